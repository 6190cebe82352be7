"""Code blocks of Markdown pages, fenced and indented."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("*.md"), ROOT / "bench" / "README.md", *ROOT.glob("docs/*.md")])
]
# First words of command lines without a `$` prompt.
TOOLS = re.compile(
    r"(attnlens|docker|gpu/bin/\w+|install|journalctl|make|ovms|(\S*/)?pip|(\S*/)?python3?|rm|systemctl"
    r"|tritonserver)\s"
)
FORM_OF_LANGUAGE = {"console": "command"}


@dataclass(frozen=True)
class Block:
    """A unit to run or parse: a whole block, or a single command line.

    Attributes:
        form: Language of the block, "command" for a command line, "json lines", "variables", or "text" for
            anything else.
        shown: Expected output, or an empty string if the page shows no output.
    """

    page: str
    line: int  # from 1
    form: str
    code: str
    shown: str = ""

    @property
    def first(self) -> str:
        """First line of the code."""
        return self.code.partition("\n")[0]

    @property
    def place(self) -> str:
        """Location, for messages."""
        return f"{self.page}:{self.line}: {self.first}"


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    return blocks_in((ROOT / page).read_text("utf-8"), page)


def blocks_in(text: str, page: str) -> list[Block]:
    """Return the blocks of a Markdown text, in order."""
    found: list[Block] = []
    before: Token | None = None
    for token in MarkdownIt().parse(text):
        if token.type in {"fence", "code_block"}:
            for block in _blocks(token, page):
                if block.form == "text" and before is not None and before.info == "python":
                    found[-1] = replace(found[-1], shown=block.code)
                else:
                    found.append(block)
        before = token
    return found


def _blocks(token: Token, page: str) -> Iterator[Block]:
    assert token.map is not None
    line = token.map[0] + 1 + (token.type == "fence")
    language = token.info.strip()
    form = FORM_OF_LANGUAGE.get(language) or language or _form(token.content)
    if form != "command":
        yield Block(page, line, form, token.content)
        return
    for at, command, shown in _commands(token.content):
        yield Block(page, line + at, form, command, shown)


def _form(content: str) -> str:
    if content.startswith("$ ") or TOOLS.match(content):
        return "command"
    if re.match(r"[A-Z_]+=", content):
        return "variables"
    return "json lines" if content.startswith('{"') else "text"


def _commands(content: str) -> Iterator[tuple[int, str, str]]:
    """Yield each command line with the number of preceding lines and its output.

    If a line starts with `$`, all command lines do, and other lines are output. A backslash joins lines.
    """
    lines = content.rstrip("\n").split("\n")
    marked = content.startswith("$ ")
    commands: list[tuple[int, str, list[str]]] = []
    for at, line in enumerate(lines):
        if at and lines[at - 1].endswith("\\") and not commands[-1][2]:
            number, begun, _ = commands[-1]
            commands[-1] = (number, begun.removesuffix("\\") + line.strip(), [])
        elif not marked or line.startswith("$ "):
            commands.append((at, line.removeprefix("$ "), []))
        else:
            commands[-1][2].append(line)
    for at, command, shown in commands:
        yield at, command, "".join(f"{line}\n" for line in shown)
