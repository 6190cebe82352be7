"""Write the code and files that pages show into the pages: `make docs`. Tests compare them.

    python docs/regenerate.py BUNDLE

BUNDLE is one of all-MiniLM-L6-v2.
"""

import re
import sys
import tempfile
from pathlib import Path

from attnlens_analysis.teach import HeadTrace, make_lesson, trace_head
from attnlens_analysis.teach.render import picture, step_lines
from attnlens_export.layouts import write_layout

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
RECIPES = DOCS.parent / "examples" / "integrations"
MODULES = {
    ("ecosystem.md", "python"): (TESTS / "ecosystem").glob("with_*.py"),
    ("ecosystem.md", "js"): (TESTS / "node").glob("with_*.mjs"),
    ("integrations.md", "python"): RECIPES.glob("*.py"),
}
# What how_attention_works.md follows, and the steps whose pictures it shows.
SENTENCE = "The animal didn't cross the street because it was too tired."
LESSON_WIDTH = 100
PICTURES = {4: "scores", 5: "scale", 6: "weights", 7: "values", 9: "heads", 10: "diagonal"}


def main() -> None:
    """Write the blocks of four pages, and the pictures of one."""
    lesson_page(Path(sys.argv[1]))
    for (page, language), modules in MODULES.items():
        for module in modules:
            replace_block(DOCS / page, language, module.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory:
        triton, ovms = Path(directory) / "triton", Path(directory) / "ovms"
        write_layout(Path(sys.argv[1]), "triton", triton)
        write_layout(Path(sys.argv[1]), "ovms", ovms)
        config = triton / "all-MiniLM-L6-v2" / "config.pbtxt"
        replace_block(DOCS / "layouts.md", "", config.read_text(encoding="utf-8"))
        replace_block(DOCS / "layouts.md", "json", (ovms / "config.json").read_text(encoding="utf-8"))


def lesson_trace(bundle: Path) -> HeadTrace:
    """Trace the head that the page about attention explains."""
    return trace_head(bundle, SENTENCE, "it", layer=3, head=1)


def lesson_page(bundle: Path) -> None:
    """Write each step of the lesson into the page about attention, and draw its pictures."""
    command = "attnlens teach bundles/minilm TEXT --token it"
    lesson = make_lesson(lesson_trace(bundle), command)
    for place, step in enumerate(lesson.steps, 1):
        lines = step_lines(place, step, LESSON_WIDTH, with_picture=False, with_explanation=False)
        block = "\n".join(lines) + "\n"
        replace_block(DOCS / "how_attention_works.md", "", block)
        if place in PICTURES:
            file = DOCS / "pictures" / f"attention_{PICTURES[place]}.svg"
            file.write_text(picture(step.picture), encoding="utf-8")


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
