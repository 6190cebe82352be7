"""Tokens as a table."""

from rich import box
from rich.table import Table

from attnlens_cli.show.console import make_console
from attnlens_cli.show.printable import counted, printable
from attnlens_client import ModelInfo, TokenizedText

_WITHOUT_PLACE = {"special", "ids"}


def print_tokens(found: TokenizedText, model: ModelInfo) -> None:
    """Print a row for each token."""
    console = make_console()
    used = f"{printable(found.model)}: {counted(len(found.tokens), 'token')}"
    used += f", the model takes {model.max_tokens:,}"
    if found.exceeds_max_tokens:
        used += "; with --truncate, other commands cut the text"
    console.print(used, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("number", "right"), ("id", "right"), ("token", "left"), ("source", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("characters", justify="right", no_wrap=True)
    for number, token in enumerate(found.tokens):
        place = "" if token.source in _WITHOUT_PLACE else f"{token.char_start}-{token.char_end}"
        table.add_row(str(number), str(token.id), printable(token.text), token.source, place)
    console.print(table)
