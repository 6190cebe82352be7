"""Violations of one list of inputs, told as those of the fields that it was made of."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from attnlens_server.errors import MAX_MESSAGE_BYTES, FieldViolation, RequestError, shortened


def rename(
    violations: Iterable[FieldViolation], inputs: Sequence[str], others: dict[str, str]
) -> list[FieldViolation]:
    """Return violations whose field begins with a field of a request.

    Args:
        violations: their fields begin with `inputs[NUMBER]`, or are among `others`.
        inputs: what each input is called in the request.
        others: the same for other fields: `{"inputs": "pairs", "prompt": "prompt_a"}`.
    """
    return [_rename(violation, inputs, others) for violation in violations]


def _rename(violation: FieldViolation, inputs: Sequence[str], others: dict[str, str]) -> FieldViolation:
    number = violation.input_index
    if number is not None:
        rest = violation.field.removeprefix(f"inputs[{number}]")
        return FieldViolation(inputs[number] + rest, violation.description)
    root, dot, rest = violation.field.partition(".")
    return replace(violation, field=others.get(root, root) + dot + rest)


def rename_error(error: RequestError, inputs: Sequence[str]) -> RequestError:
    """Put the names of a request's fields into an error about its inputs, and return it."""
    error.violations = tuple(rename(error.violations, inputs, {}))
    told = (f"{violation.field} {violation.description}" for violation in error.violations)
    error.message = shortened("; ".join(told), MAX_MESSAGE_BYTES)
    error.args = (error.message,)
    return error
