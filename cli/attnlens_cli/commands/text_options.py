"""The options of the commands that take one text, or a file of them."""

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import check_prompt, check_sendable
from attnlens_cli.files.text_lines import InputFile, Line, input_file

if TYPE_CHECKING:
    from attnlens_client import ModelInfo

_OPTIONS = (
    click.argument("text", required=False),
    click.option(
        "--text-pair",
        metavar="TEXT",
        help="A second text, which the model reads with the first as one input.",
    ),
    click.option(
        "--input",
        "-i",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, allow_dash=True),
        help="Instead of TEXT: a file with one text a line, or JSON lines with the text under "
        '"text", a second one under "text_pair"; - is standard input.',
    ),
    click.option(
        "--input-format",
        type=click.Choice(["auto", "lines", "jsonl"]),
        default="auto",
        show_default=True,
        help="auto: jsonl where FILE ends in .jsonl, else lines.",
    ),
    click.option(
        "--prompt-name", help="Put this prompt of the model before each text.  [default: the model's]"
    ),
    click.option("--prompt", metavar="TEXT", help="Put TEXT before each text; '' for no prompt at all."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What to send. The fields are the options above."""

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
                '--text-pair goes with TEXT: JSON lines have the second text as "text_pair"'
            )
        check_prompt(self.prompt_name, self.prompt)
        texts = {"TEXT": self.text, "--text-pair": self.text_pair}
        check_sendable({**texts, "--prompt": self.prompt, "--prompt-name": self.prompt_name})

    @property
    def file(self) -> InputFile | None:
        """The file that they come from; None for TEXT."""
        return None if self.input is None else input_file(self.input, self.input_format)

    @property
    def prompts(self) -> dict[str, str | None]:
        """The prompt as arguments of the client's methods."""
        return {"prompt_name": self.prompt_name, "prompt": self.prompt}

    def prompt_of(self, model: "ModelInfo") -> str:
        """Return the prompt that is put before each text."""
        if self.prompt is not None:
            return self.prompt
        return model.prompts.get(self.prompt_name or model.default_prompt_name, "")

    def batches(self, size: int, model: "ModelInfo", own_keys: Collection[str]) -> Iterator[list[Line]]:
        """Yield the texts, `size` at a time; TEXT alone is a line with the number 0.

        Raises:
            click.ClickException: a line is wrong, or TEXT is a pair and the model takes none.
        """
        file = self.file
        if file is not None:
            lines = file.lines(model.limits.max_text_bytes, own_keys)
            while batch := list(islice(lines, size)):
                yield batch
            return
        if self.text_pair is not None and not model.supports_text_pairs:
            raise click.BadParameter(f"{model.name} takes no pairs of texts", param_hint="'--text-pair'")
        text = self.text or ""
        yield [Line(text if self.text_pair is None else (text, self.text_pair), 0, 0)]

    def name_of(self, line: Line) -> str:
        """Return what the user calls a text."""
        file = self.file
        if file is not None:
            return f"{file.name}, line {line.number}"
        return "TEXT" if self.text_pair is None else "TEXT with --text-pair"


def text_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to `command`, which gets them as one argument, `texts`."""
    names = [field.name for field in fields(Texts)]

    @functools.wraps(command)
    def with_texts(*args: Any, **given: Any) -> None:  # noqa: ANN401 - whatever click passes
        texts = Texts(**{name: given.pop(name) for name in names})
        command(*args, texts=texts, **given)

    for option in reversed(_OPTIONS):
        with_texts = option(with_texts)
    return with_texts
