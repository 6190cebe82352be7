"""Write the code and files that pages show into the pages: `make docs`. Tests compare them.

    python docs/regenerate.py BUNDLE

BUNDLE is one of all-MiniLM-L6-v2.
"""

import re
import sys
import tempfile
from pathlib import Path

from attnlens_export.layouts import write_layout

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
MODULES = {"python": (TESTS / "ecosystem").glob("with_*.py"), "js": (TESTS / "node").glob("with_*.mjs")}


def main() -> None:
    """Write the blocks of two pages."""
    for language, modules in MODULES.items():
        for module in modules:
            replace_block(DOCS / "ecosystem.md", language, module.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        triton, ovms = Path(directory) / "triton", Path(directory) / "ovms"
        write_layout(Path(sys.argv[1]), "triton", triton)
        write_layout(Path(sys.argv[1]), "ovms", ovms)
        config = triton / "all-MiniLM-L6-v2" / "config.pbtxt"
        replace_block(DOCS / "layouts.md", "", config.read_text(encoding="utf-8"))
        replace_block(DOCS / "layouts.md", "json", (ovms / "config.json").read_text(encoding="utf-8"))


def replace_block(page: Path, language: str, content: str) -> None:
    """Put `content` in place of the block of `page` that has the same first line.

    Raises:
        ValueError: there is not exactly one such block.
    """
    first_line = content.partition("\n")[0]
    block = re.compile(rf"^```{language}\n{re.escape(first_line)}\n.*?^```$", re.DOTALL | re.MULTILINE)
    text, count = block.subn(lambda _: f"```{language}\n{content}```", page.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{page.name} has {count} blocks that begin with {first_line!r}, not 1")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
