"""docs/how_attention_works.md and its charts match the current output of the model."""

import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")  # required by docs/regenerate.py

DOCS = Path(__file__).parents[3] / "docs"
PAGE, PICTURES = DOCS / "how_attention_works.md", sorted((DOCS / "pictures").glob("attention_*.svg"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.fixture(scope="module")
def regenerated(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the regenerated page and charts."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "pictures").mkdir()
    for name in ("regenerate.py", PAGE.name):
        shutil.copy(DOCS / name, folder / name)
    runpy.run_path(str(folder / "regenerate.py"))["lesson_page"](minilm_bundle)
    return folder


@pytest.mark.parametrize("name", ["page", *[f"pictures/{picture.name}" for picture in PICTURES]])
def test_page_and_its_charts_are_up_to_date(regenerated: Path, name: str) -> None:
    committed = DOCS / (PAGE.name if name == "page" else name)
    # Fill colors are derived from the numbers.
    actual, expected = (
        re.sub(r"fill='#\w+'", "", path.read_text("utf-8"))
        for path in (regenerated / committed.relative_to(DOCS), committed)
    )
    assert NUMBER.sub("#", actual) == NUMBER.sub("#", expected)
    # Rounding differs between processors.
    actual_numbers, expected_numbers = (
        np.array(NUMBER.findall(text), np.float64) for text in (actual, expected)
    )
    np.testing.assert_allclose(actual_numbers, expected_numbers, rtol=1e-3, atol=2e-4)


def test_page_shows_every_chart() -> None:
    page = PAGE.read_text("utf-8")
    assert len(PICTURES) == 12
    for picture in PICTURES:
        assert f"](pictures/{picture.name})" in page
