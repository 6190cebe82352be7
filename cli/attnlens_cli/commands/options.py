"""Options that several commands have.

Names of poolings, layouts and methods are stated here a second time, because importing the packages that
define them takes seconds. Tests compare them with those packages.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attnlens_cli.files.text_lines import LIMIT_OF_BYTES, is_sendable
from attnlens_cli.frame.failures import BadReplyFailure
from attnlens_cli.frame.sections import in_section

if TYPE_CHECKING:
    from attnlens_client import AttnlensError

_Command = TypeVar("_Command", bound=Callable[..., Any])

_MAX_INT32 = 2**31 - 1
POOLINGS = ("mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length")
LAYOUT_NAMES = ("triton", "ovms")
EXPLAIN_METHODS = (
    "contributions",
    "output_share",
    "leave_one_out",
    "rollout",
    "received_attention",
    "contribution_norm",
)
PAIR_MATRICES = ("output", "interaction", "input")

parity_tokens_option = in_section("Parity")(
    "--parity-tokens",
    type=click.IntRange(min=1),
    help="Longest input to compare.  [default: what 1 GiB of attention maps allows]",
)

link_option = in_section("Model repositories")(
    "--link/--copy",
    default=False,
    help="Hard links to the bundle's files, to save space, or copies.  [default: copies, because "
    "Python's onnx refuses weights with several hard links]",
)


def dimensions_option(section: str) -> Callable[[_Command], _Command]:
    """Return `--dimensions` in a section of the help."""
    return in_section(section)(
        "--dimensions", type=click.IntRange(1, _MAX_INT32), help="Keep the first components only."
    )


def check_sendable(texts: Mapping[str, str | None]) -> None:
    """Refuse texts, by what the user calls them, that are not UTF-8."""
    for name, text in texts.items():
        if not is_sendable(text or ""):
            raise click.BadParameter("it is not UTF-8", param_hint=f"'{name}'")


def check_prompt(prompt_name: str | None, prompt: str | None) -> None:
    """Refuse a prompt that is named and given as well."""
    if prompt_name is not None and prompt is not None:
        raise click.UsageError("give either --prompt-name or --prompt")


@contextmanager
def too_long_explained(field: str, name: str) -> Iterator[None]:
    """Say of a text that is too long, the field of a call, what the user calls it and what to do."""
    from attnlens_client import InputTooLongError  # noqa: PLC0415 - heavy

    try:
        yield
    except InputTooLongError as error:
        if any(violation.field != field for violation in error.violations):
            raise
        raise text_failure(error, name) from error


def text_failure(error: "AttnlensError", name: str) -> click.ClickException:
    """Return the failure of a call for its first text that is to blame, by what the user calls it."""
    from attnlens_client import BadReplyError, InputTooLongError  # noqa: PLC0415 - heavy

    if isinstance(error, InputTooLongError):
        return click.ClickException(
            f"{name} has {error.num_tokens} tokens, the model takes {error.max_tokens}: shorten it, or give "
            "--truncate"
        )
    violations = (violation for violation in error.violations if violation.text_index is not None)
    description = next(violations).description
    if " bytes" in description and "a text may have" in description:
        description = f"{description} ({LIMIT_OF_BYTES})"
    if isinstance(error, BadReplyError):
        return BadReplyFailure(f"the reply is wrong: {name} {description}")
    return click.ClickException(f"{name} {description}")
