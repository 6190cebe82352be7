"""Write the code and files that pages show into the pages: `make docs`. Tests compare them.

    python docs/regenerate.py BUNDLE

BUNDLE is one of all-MiniLM-L6-v2.
"""

import re
import sys
import tempfile
from pathlib import Path

from attnlens_analysis.teach import HeadTrace, make_lesson, trace_head
from attnlens_analysis.teach.diagrams import head_diagram, heads_diagram, stack_diagram
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
# What how_attention_works.md follows, and the steps whose charts it shows, with the names of their files.
SENTENCE = "The animal didn't cross the street because it was too tired."
LESSON_WIDTH = 100
PICTURES = {
    "scores": "scores",
    "scale": "scale",
    "softmax": "weights",
    "temperature": "temperature",
    "masks": "masks",
    "values": "values",
    "contexts": "contexts",
    "agreement": "heads",
    "diagonal": "diagonal",
}


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
    trace = lesson_trace(bundle)
    lesson = make_lesson(trace, command)
    for place, step in enumerate(lesson.steps, 1):
        lines = step_lines(place, step, LESSON_WIDTH, with_picture=False, with_explanation=False)
        block = "\n".join(lines) + "\n"
        replace_block(DOCS / "how_attention_works.md", "", block)
        if step.key in PICTURES:
            draw(PICTURES[step.key], picture(step.picture))
    draw("diagram_head", head_diagram(trace.sizes, follows_theme=True).svg)
    draw("diagram_heads", heads_diagram(trace.sizes, follows_theme=True).svg)
    draw(
        "diagram_layers",
        stack_diagram(trace.sizes, is_pre_norm=trace.is_pre_norm, follows_theme=True).svg,
    )


def draw(name: str, svg: str) -> None:
    """Write a picture of the page about attention."""
    (DOCS / "pictures" / f"attention_{name}.svg").write_text(svg, encoding="utf-8")


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
