"""`attnlens teach DIR TEXT`: one token through one head, step by step."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnlens_cli.files.new_file import checked_path, replacing
from attnlens_cli.files.text_lines import is_sendable
from attnlens_cli.frame.sections import SectionCommand, in_section

if TYPE_CHECKING:
    from attnlens_analysis.teach import HeadTrace

EPILOG = """\b
Example:
  attnlens teach bundles/minilm "The animal didn't cross the street because it was too tired." \\
    --token it --layer 3 --head 1
  attnlens teach bundles/minilm "It rained, so it was wet." --token wet --html wet.html"""

_COST_LENGTHS = (16, 128, 256, 512)
_MAX_WIDTH = 100

_follow = in_section("What to follow")
_file = in_section("What to write")


@click.command(cls=SectionCommand, epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("text")
@_follow(
    "--token", required=True, metavar="TOKEN|NUMBER", help="The token, word or number of a token to follow."
)
@_follow("--layer", type=int, help="The layer, from 0; negative numbers count from the end.")
@_follow(
    "--head",
    type=int,
    help="The head, from 0; negative counts from the end.  [default for both: where the token gives most to "
    "--to, or to a token that is not next to it]",
)
@_follow(
    "--to", metavar="TOKEN|NUMBER", help="What it should attend to.  [default: what it gives most to there]"
)
@_follow(
    "--rather-than",
    metavar="TOKEN|NUMBER",
    help="What it should attend to less.  [default: the next of the weights]",
)
@_file("--cost/--no-cost", default=True, show_default=True, help="Measure the cost by length too.")
@_file("--markdown", metavar="FILE", help="Write a page in Markdown (.md).")
@_file("--html", metavar="FILE", help="Write one HTML file with pictures (.html).")
@_file("--npz", metavar="FILE", help="Write the head's q, k, v, scores and weights for numpy (.npz).")
def teach(
    directory: Path,
    text: str,
    token: str,
    layer: int | None,
    head: int | None,
    to: str | None,
    rather_than: str | None,
    cost: bool,
    markdown: str | None,
    html: str | None,
    npz: str | None,
) -> None:
    """Walk a token of TEXT through one attention head of the bundle DIR, with the model's own numbers.

    Each step has its formula, its numbers, a picture, what is easily misread, and something to try. Nothing
    but the bundle is needed, which is not changed. No server is asked, and no prompt is put before TEXT.

    It takes apart attention that is a softmax of q·k, with rotation, biases, windows or shared keys. Layers
    of other mechanisms are refused.
    """
    if not is_sendable(text):
        raise click.BadParameter("it is not UTF-8", param_hint="'TEXT'")
    paths = {
        suffix: checked_path(name, f"--{option}", (suffix,))
        for option, suffix, name in (
            ("markdown", ".md", markdown),
            ("html", ".html", html),
            ("npz", ".npz", npz),
        )
        if name
    }
    from attnlens_analysis.errors import TextError, UnknownHeadError, UnknownTokenError
    from attnlens_analysis.teach import trace_head

    lengths = _COST_LENGTHS if cost else ()
    try:
        trace = trace_head(
            directory, text, token, layer=layer, head=head, target=to, rival=rather_than, lengths=lengths
        )
    except (TextError, UnknownHeadError, UnknownTokenError) as error:
        raise click.UsageError(str(error)) from error
    _write(trace, _command(directory, text, token), paths)


def _command(directory: Path, text: str, token: str) -> str:
    """Return the command line that asks the trace, for the reader to extend."""
    from attnlens_analysis.teach.tokens import shown

    return shown(shlex.join(["attnlens", "teach", str(directory), text, "--token", token]))


def _write(trace: "HeadTrace", command: str, paths: dict[str, Path]) -> None:
    """Write the files that were asked for; print the lesson where there is none to read."""
    from attnlens_analysis.teach import make_lesson
    from attnlens_analysis.teach.render import as_html, as_markdown, as_text

    npz = paths.get(".npz")
    lesson = make_lesson(trace, command, npz.name if npz else "head.npz")
    for suffix, render in ((".md", as_markdown), (".html", as_html)):
        if suffix in paths:
            with replacing(paths[suffix]) as file:
                file.write(render(lesson).encode())
    if npz:
        with replacing(npz) as file:
            trace.save(file)
    for path in paths.values():
        click.echo(f"{path}: {lesson.title}", err=True)
    if not paths.keys() & {".md", ".html"}:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        click.echo(as_text(lesson, width).encode())
