"""Options that several commands share, with their validation and error messages.

The names of poolings, layouts and methods are repeated here, because importing the packages that define them
takes seconds. Tests compare them.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attnlens_cli.files.text_lines import BYTE_LIMIT_REMEDY, InputFile, Line, input_file
from attnlens_cli.frame.failures import BadReplyFailure
from attnlens_cli.frame.options import TEXT, in_section, option, stacked

if TYPE_CHECKING:
    from attnlens_client import AttnlensError, ModelInfo

_Command = TypeVar("_Command", bound=Callable[..., Any])

_MAX_INT32 = 2**31 - 1
_MAX_BATCH_SIZE = 65_536
POOLINGS = ("mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length")
EMBEDDING_TYPES = ("float", "int8", "uint8", "binary", "ubinary")
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

_INPUT, _EMBEDDING, _OUTPUT = "Input", "Embedding", "Output"


def _check_one_prompt(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    other = "prompt" if parameter.name == "prompt_name" else "prompt_name"
    if value is not None and ctx.params.get(other) is not None:
        raise click.UsageError("give either --prompt-name or --prompt")
    return value


source_argument = click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
bundle_argument = click.argument(
    "directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
cache_option = option(
    "--cache-dir",
    metavar="DIR",
    is_shared=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of bundles that were exported from checkpoints. ATTNLENS_CACHE_DIR sets it for all "
    "commands.  [default: ~/.cache/attnlens]",
)
parity_tokens_option = in_section("Parity")(
    "--parity-tokens",
    type=click.IntRange(min=1),
    help="Maximum length of a compared input.  [default: the length whose attention fits into 1 GiB]",
)
without_comparison_option = in_section("Parity")(
    "--without-comparison",
    is_flag=True,
    help="Do not compare the results of SOURCE with its publisher's pipeline, sentence-transformers or "
    "transformers.",
)
link_option = in_section("Model repositories")(
    "--link/--copy",
    default=False,
    help="Use hard links to the bundle's files, which saves space, or copies.  [default: copies, because "
    "Python's onnx rejects weights with several hard links]",
)
text_pair_option = in_section(_INPUT)(
    "--text-pair", type=TEXT, help="Second text of a pair, which the model reads as one input."
)
input_format_option = in_section(_INPUT)(
    "--input-format",
    type=click.Choice(["auto", "lines", "jsonl"]),
    default="auto",
    show_default=True,
    help="Format of FILE. auto: jsonl if the name ends in .jsonl, .ndjson or .json, otherwise lines.",
)
prompt_options = stacked(
    in_section(_INPUT)(
        "--prompt-name",
        metavar="NAME",
        type=TEXT,
        callback=_check_one_prompt,
        help="Prompt of the model to prepend.  [default: the model's default prompt]",
    ),
    in_section(_INPUT)(
        "--prompt", type=TEXT, callback=_check_one_prompt, help="Text to prepend; '' for no prompt."
    ),
)
truncate_option = in_section(_INPUT)(
    "--truncate", is_flag=True, help="Truncate texts that exceed the model's maximum, instead of failing."
)
reading_options = stacked(prompt_options, truncate_option)
"""Arguments `prompt_name`, `prompt` and `truncate` of the client's methods."""
vector_options = stacked(
    in_section(_EMBEDDING)(
        "--pooling",
        type=click.Choice(POOLINGS),
        help="Pooling of token vectors.  [default: as configured for the model]",
    ),
    in_section(_EMBEDDING)(
        "--dimensions", type=click.IntRange(1, _MAX_INT32), help="Number of leading components to keep."
    ),
)
"""Arguments `pooling` and `dimensions` of the client's methods."""
data_type_option = in_section(_OUTPUT)(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="Data type of the numbers.",
)
unit_options = stacked(
    in_section("Selection")("--words", is_flag=True, help="Merge the tokens of each word."),
    in_section("Selection")(
        "--no-special", is_flag=True, help="Drop special tokens, and rescale rows so that they sum to 1."
    ),
)
"""Reduction of attention weights: `words` and `no_special`."""
explanation_output_options = stacked(
    in_section(_OUTPUT)("--words", is_flag=True, help="Add up the tokens of each word."),
    in_section(_OUTPUT)("--top", type=click.IntRange(min=1), help="Number of largest scores to show."),
    in_section(_OUTPUT)("--json", "as_json", is_flag=True, help="Print one JSON object."),
    in_section(_OUTPUT)(
        "--html", metavar="FILE", help="Also write an HTML page with the scores and all attention."
    ),
)
json_option = option("--json", "as_json", is_flag=True, help="Print one JSON object.")
measurements_json_option = in_section(_OUTPUT)(
    "--json", "as_json", is_flag=True, help="Print every measurement as JSON."
)


def batch_size_option(default: int) -> Callable[[_Command], _Command]:
    """Return `--batch-size`."""
    return in_section("Requests")(
        "--batch-size",
        type=click.IntRange(1, _MAX_BATCH_SIZE),
        default=default,
        show_default=True,
        help="Number of texts per call.",
    )


_TEXT_OPTIONS = (
    click.argument("text", required=False, type=TEXT),
    text_pair_option,
    in_section(_INPUT)(
        "--input",
        "-i",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, allow_dash=True),
        help="File to read instead of TEXT: one text per line, or JSON lines with the text under "
        '"text" and the second text of a pair under "text_pair". - is standard input.',
    ),
    input_format_option,
    prompt_options,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """TEXT or the texts of --input, and their prompt."""

    text: str | None
    text_pair: str | None
    input: str | None
    input_format: str
    prompt_name: str | None
    prompt: str | None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.input is None):
            raise click.UsageError("give either TEXT or --input FILE")
        if self.text_pair is not None and self.text is None:
            raise click.UsageError(
                '--text-pair goes with TEXT: in JSON lines, the second text is "text_pair"'
            )

    @property
    def file(self) -> InputFile | None:
        """The input file, or None for TEXT."""
        return None if self.input is None else input_file(self.input, self.input_format)

    @property
    def prompts(self) -> dict[str, str | None]:
        """The prompt as arguments of the client's methods."""
        return {"prompt_name": self.prompt_name, "prompt": self.prompt}

    def batches(self, size: int, model: "ModelInfo", own_keys: Collection[str]) -> Iterator[list[Line]]:
        """Yield the texts in batches of `size`.

        Args:
            size: Maximum number of texts in a batch.
            model: Model that reads the texts.
            own_keys: Keys of the output, which must not occur in the input.

        Raises:
            click.ClickException: A line is invalid, or the model does not support pairs.
        """
        file = self.file
        if file is not None:
            lines = file.lines(model.limits.max_text_bytes, own_keys)
            while batch := list(islice(lines, size)):
                yield batch
            return
        yield [Line(single_input(self.text or "", self.text_pair, model), 0, 0)]

    def name_of(self, line: Line) -> str:
        """Return the name of a text in messages."""
        file = self.file
        if file is not None:
            return f"{file.name}, line {line.number}"
        return "TEXT" if self.text_pair is None else "TEXT with --text-pair"


def text_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add TEXT, --input and the prompt options to `command`, which receives them as the argument `texts`."""
    names = [field.name for field in fields(Texts)]

    @functools.wraps(command)
    def with_texts(*args: Any, **given: Any) -> None:  # noqa: ANN401 - as in click
        texts = Texts(**{name: given.pop(name) for name in names})
        command(*args, texts=texts, **given)

    return stacked(*_TEXT_OPTIONS)(with_texts)


def single_input(text: str, text_pair: str | None, model: "ModelInfo") -> str | tuple[str, str]:
    """Return a text or a pair as input of the client.

    Raises:
        click.BadParameter: The model does not support pairs.
    """
    if text_pair is None:
        return text
    if not model.supports_text_pairs:
        raise click.BadParameter(f"{model.name} does not support text pairs", param_hint="'--text-pair'")
    return text, text_pair


def prompt_text(model: "ModelInfo", prompt_name: str | None, prompt: str | None) -> str:
    """Return the prompt that the server prepends."""
    return model.prompts.get(prompt_name or model.default_prompt_name, "") if prompt is None else prompt


def checked_index(kind: str, index: int, count: int, model_name: str) -> int:
    """Return a layer or head index from 0. A negative index counts from the end.

    Raises:
        click.BadParameter: The model has no such layer or head.
    """
    if not -count <= index < count:
        raise click.BadParameter(
            f"{index}: {model_name} has the {kind}s 0 to {count - 1}, or -{count} to -1",
            param_hint=f"'--{kind}'",
        )
    return index % count


def check_version(version: str, expected: str) -> None:
    """Raise BadReplyError if the model was replaced during the command."""
    from attnlens_client import BadReplyError  # noqa: PLC0415 - heavy

    if version != expected:
        raise BadReplyError(f"the model version changed from {expected!r} to {version!r} during the command")


@contextmanager
def too_long_explained(names: Mapping[str, str], default: str | None = None) -> Iterator[None]:
    """Add the remedy to the error about a text that is too long.

    Args:
        names: Names of texts in messages, by the field of the call.
        default: Name of a text in any other field. If None, their errors are not changed.
    """
    from attnlens_client import InputTooLongError  # noqa: PLC0415 - heavy

    try:
        yield
    except InputTooLongError as error:
        violated = {names.get(violation.field, default) for violation in error.violations} or {default}
        [name, *others] = violated
        if name is None or others:
            raise
        raise text_failure(error, name) from error


def text_failure(error: "AttnlensError", name: str) -> click.ClickException:
    """Return the failure of a call because of the text with this name."""
    from attnlens_client import BadReplyError, InputTooLongError  # noqa: PLC0415 - heavy

    if isinstance(error, InputTooLongError):
        return click.ClickException(
            f"{name} has {error.num_tokens} tokens, but the limit is {error.max_tokens}: shorten it, "
            "or give --truncate"
        )
    violations = (violation for violation in error.violations if violation.text_index is not None)
    description = next(violations).description
    if " bytes" in description and description.endswith("split the text"):
        description = f"{description} ({BYTE_LIMIT_REMEDY})"
    if isinstance(error, BadReplyError):
        return BadReplyFailure(f"invalid response: {name} {description}")
    return click.ClickException(f"{name} {description}")
