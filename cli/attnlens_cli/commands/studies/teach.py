"""`attnlens teach`: follow a token through one attention head, step by step."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnlens_cli.commands.options import bundle_argument
from attnlens_cli.files.output_file import checked_path, replacing
from attnlens_cli.frame.options import TEXT, Command, in_section

if TYPE_CHECKING:
    from attnlens_analysis.teach import HeadTrace

EPILOG = """\b
Example:
  attnlens teach bundles/minilm "The animal didn't cross the street because it was too tired." \\
    --token it --layer 3 --head 1
  attnlens teach bundles/minilm "It rained, so it was wet." --token wet --html wet.html
  attnlens teach bundles/minilm "It rained, so it was wet." --interactive page.html"""

_COST_LENGTHS = (16, 128, 256, 512)
_MAX_WIDTH = 100

_select, _output = in_section("Selection"), in_section("Output")


@click.command(cls=Command, epilog=EPILOG)
@bundle_argument
@click.argument("text", type=TEXT)
@_select(
    "--token",
    metavar="TOKEN|INDEX",
    help="Token or word to follow, or a token index. Optional with --interactive.",
)
@_select("--layer", metavar="INDEX", type=int, help="Layer index. Negative indices count from the end.")
@_select(
    "--head",
    metavar="INDEX",
    type=int,
    help="Head index. Negative indices count from the end.  [default for --layer and --head: the largest "
    "attention weight on --to, or on a token that is not a neighbor]",
)
@_select("--to", metavar="TOKEN|INDEX", help="Key to explain.  [default: the largest attention weight]")
@_select(
    "--rather-than", metavar="TOKEN|INDEX", help="Key to compare with.  [default: the next largest weight]"
)
@_select(
    "--contexts",
    nargs=3,
    metavar="TEXT1 TEXT2 TEXT3",
    help="Texts in which to compare the word of --token.  [default: three texts with “bank”]",
)
@_output("--cost/--no-cost", default=True, show_default=True, help="Measure the time by text length.")
@_output("--markdown", metavar="FILE", help="Write the lesson as Markdown (.md).")
@_output("--html", metavar="FILE", help="Write the lesson as one HTML file with pictures (.html).")
@_output(
    "--interactive",
    metavar="FILE",
    help="Write one HTML file on which the reader selects token, layer and head (.html).",
)
@_output("--npz", metavar="FILE", help="Write q, k, v, scores and weights of the head for NumPy (.npz).")
def teach(
    directory: Path,
    text: str,
    token: str | None,
    layer: int | None,
    head: int | None,
    to: str | None,
    rather_than: str | None,
    contexts: tuple[str, str, str] | None,
    cost: bool,
    markdown: str | None,
    html: str | None,
    interactive: str | None,
    npz: str | None,
) -> None:
    """Follow a token of TEXT through one attention head of the bundle DIR, with the model's numbers.

    Each step has a formula, numbers, a picture, a common misreading, and an experiment. Needs no server, does
    not change the bundle, and prepends no prompt.

    Supports all attention mechanisms. For those that are not a softmax of q·k alone, the lesson shows the
    difference as a term of the scores.
    """
    paths = _checked_paths({"markdown": markdown, "html": html, "npz": npz})
    page = checked_path(interactive, "--interactive", (".html",)) if interactive else None
    lesson_is_requested = page is None or bool(paths)
    if token is None and lesson_is_requested:
        raise click.UsageError("missing option '--token'. It is optional only with --interactive alone.")
    if not lesson_is_requested and (to or rather_than or contexts):
        raise click.UsageError("--to, --rather-than and --contexts need --markdown, --html or --npz.")
    from attnlens_analysis.errors import TextError, UnknownHeadError, UnknownTokenError
    from attnlens_analysis.teach import Contexts, trace_head, walkthrough_page

    try:
        if page is not None:
            content = walkthrough_page(directory, text, token=token, layer=layer, head=head).encode()
            with replacing(page) as file:
                file.write(content)
            click.echo(f"{page}: {len(content) / 1e6:.2f} MB, open it in a browser", err=True)
        if lesson_is_requested and token is not None:
            trace = trace_head(
                directory,
                text,
                token,
                layer=layer,
                head=head,
                target=to,
                rival=rather_than,
                lengths=_COST_LENGTHS if cost else (),
                contexts=Contexts(token, contexts) if contexts else None,
            )
            _write(trace, _command(directory, text, token), paths)
    except (TextError, UnknownHeadError, UnknownTokenError) as error:
        raise click.UsageError(str(error)) from error


def _checked_paths(names: dict[str, str | None]) -> dict[str, Path]:
    """Return the paths of requested files by suffix."""
    suffixes = {"markdown": ".md", "html": ".html", "npz": ".npz"}
    return {
        suffixes[option]: checked_path(name, f"--{option}", (suffixes[option],))
        for option, name in names.items()
        if name
    }


def _command(directory: Path, text: str, token: str) -> str:
    """Return the command line of the lesson, for the reader to extend."""
    from attnlens_analysis.teach.tokens import shown

    # shlex quotes an apostrophe as '"'"'.
    quoted = f'"{text}"' if set(text).isdisjoint('"$`\\!') else shlex.quote(text)
    return shown(f"attnlens teach {shlex.quote(str(directory))} {quoted} --token {shlex.quote(token)}")


def _write(trace: "HeadTrace", command: str, paths: dict[str, Path]) -> None:
    """Write the requested files, and print the lesson unless it is in one of them."""
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
