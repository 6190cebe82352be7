"""Checking what a query asks to make of weights, and the rows that it asks for of each text."""

from collections.abc import Iterator, Mapping, Sequence

from attnlens.reductions import MAX_ROWS, AttentionReduction, SqrtUint8, resolve_rows
from attnlens_server.bundle import Model, OutputRole, RowSum
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.serving.jobs import AttentionQuery, AttentionView
from attnlens_server.text import EncodedInput, Input


def reduction_problems(
    field: str, query: AttentionQuery, model: Model, inputs: Sequence[Input]
) -> Iterator[FieldViolation]:
    """Yield what is wrong with the reduction of a query, whatever tokens the texts have.

    Args:
        field: the path of the query.
        query: with or without a reduction.
        model: whose outputs it is of.
        inputs: of the job.
    """
    reduction = query.reduction
    if reduction is None:
        return
    path = f"{field}.reduction"
    for name, text in reduction.problems():
        yield FieldViolation(f"{path}.{name}", text)
    if model.max_positions < len(reduction.rows) <= MAX_ROWS:
        text = f"has {len(reduction.rows)} numbers: no text has more than {model.max_positions} tokens"
        yield FieldViolation(f"{path}.rows", text)
    if query.role is OutputRole.HEAD_GATES:
        text = "is of weights between tokens, and OUTPUT_ROLE_HEAD_GATES has none: leave it out"
        yield FieldViolation(path, text)
        return
    if reduction.layers == "rollout" and query.view is not AttentionView.HEAD_MEAN:
        text = f"is ATTENTION_VIEW_{query.view.name}: a rollout is of the mean over heads, leave the view out"
        yield FieldViolation(f"{field}.view", text)
    yield from _of_sums(
        path, reduction, {output.row_sum for output in model.outputs.layers(query.role).values()}
    )
    yield from _of_inputs(path, reduction, inputs)


def _of_sums(path: str, reduction: AttentionReduction, sums: set[RowSum]) -> Iterator[FieldViolation]:
    """Compare what a reduction needs with what rows sum to."""
    needs = reduction.needs_distributions
    others = sorted(sums - {RowSum.ONE})
    if needs is not None and others:
        name, reason = needs
        text = f"needs ROW_SUM_ONE, {reason}: this output has ROW_SUM_{others[0].name}, leave it out"
        yield FieldViolation(f"{path}.{name}", text)
    others = sorted(sums - {RowSum.ONE, RowSum.GATE})
    if isinstance(reduction.form, SqrtUint8) and others:
        text = f"needs weights from 0 to 1: this output has ROW_SUM_{others[0].name}, ask for dense weights"
        yield FieldViolation(f"{path}.sqrt_uint8", text)


def _of_inputs(path: str, reduction: AttentionReduction, inputs: Sequence[Input]) -> Iterator[FieldViolation]:
    """Refuse ids where words or special tokens must be known."""
    by_ids = next((index for index, given in enumerate(inputs) if given.token_ids is not None), None)
    if by_ids is None:
        return
    for name, is_asked, what, remedy in (
        ("level", reduction.level == "words", "words", "send text, or ask for tokens"),
        ("special_tokens", reduction.special_tokens == "drop", "special tokens", "send text, or keep them"),
        ("statistics.received", reduction.sums_content_rows, "special tokens", "send text, or set all_rows"),
    ):
        if is_asked:
            text = f"has {what} that are not known, and {path}.{name} needs them: {remedy}"
            yield FieldViolation(f"inputs[{by_ids}].token_ids", text, by_ids)


def check_rows(
    reductions: Mapping[int, AttentionReduction], first: int, inputs: Sequence[EncodedInput]
) -> None:
    """Make sure that texts have the rows that are asked for.

    Args:
        reductions: what is asked for, by the number of the query.
        first: the number of the first of `inputs` in the job.
        inputs: texts as tokens, with units where a query needs them.

    Raises:
        InvalidFieldsError: a text has not.
    """
    for number, reduction in reductions.items():
        for index, encoded in enumerate(inputs, first):
            try:
                resolve_rows(reduction.rows, encoded.num_units(reduction))
            except IndexError as error:
                [place] = error.args
                raise InvalidFieldsError([_missing_row(number, reduction, place, index, encoded)]) from error


def _missing_row(
    number: int, reduction: AttentionReduction, place: int, index: int, encoded: EncodedInput
) -> FieldViolation:
    asked = f"attention[{number}].reduction.rows[{place}] is {reduction.rows[place]}"
    count = encoded.num_units(reduction)
    there = f"use 0 to {count - 1}, or -{count} to -1" if count else "leave it out"
    return FieldViolation(f"inputs[{index}]", f"has {count} rows, and {asked}: {there}", index)
