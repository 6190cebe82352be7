"""The static page of a lesson is readable on a phone, in both color schemes, and with a keyboard."""

from pathlib import Path

import pytest

from attnlens_analysis.teach import make_lesson, trace_head
from attnlens_analysis.teach.render import as_html
from opened_page import Open

pytest.importorskip("onnx")  # optional dependency

SENTENCE = "The animal didn't cross the street because it was too tired."


@pytest.fixture(scope="module")
def lesson_file(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lesson") / "lesson.html"
    trace = trace_head(minilm_bundle, SENTENCE, "it", layer=3, head=1)
    path.write_text(as_html(make_lesson(trace, "attnlens teach DIR TEXT --token it")), encoding="utf-8")
    return path


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280)])
def test_axe_reports_no_violations_and_nothing_overflows(
    open_file: Open, lesson_file: Path, scheme: str, width: int
) -> None:
    page = open_file(lesson_file, color_scheme=scheme, width=width, ready="true")
    assert page.violations() == []
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


def test_page_follows_the_color_scheme(open_file: Open, lesson_file: Path) -> None:
    page = open_file(lesson_file, color_scheme="dark", ready="true")
    brightness = "getComputedStyle({}).backgroundColor.match(/\\d+/)[0]"
    assert int(page.tab.evaluate(brightness.format("document.body"))) < 64
    assert "invert" in page.tab.evaluate("getComputedStyle(document.querySelector('svg')).filter")


def test_labels_of_pictures_are_at_least_8_pixels_high_on_a_phone(open_file: Open, lesson_file: Path) -> None:
    page = open_file(lesson_file, width=390, ready="true")
    heights = """[...document.querySelectorAll("svg")].map((svg) =>
      12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"""
    assert min(page.tab.evaluate(heights)) >= 8
