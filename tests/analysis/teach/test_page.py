"""docs/how_attention_works.md and its pictures, against what the model says now."""

import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")  # what writes the page imports the exporter

DOCS = Path(__file__).parents[3] / "docs"
PAGE, PICTURES = DOCS / "how_attention_works.md", sorted((DOCS / "pictures").glob("attention_*.svg"))
# With or without an exponent.
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.fixture(scope="module")
def fresh(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page, written again elsewhere."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "pictures").mkdir()
    for name in ("regenerate.py", PAGE.name):
        shutil.copy(DOCS / name, folder / name)
    runpy.run_path(str(folder / "regenerate.py"))["lesson_page"](minilm_bundle)
    return folder


@pytest.mark.parametrize("place", ["page", *[f"pictures/{picture.name}" for picture in PICTURES]])
def test_the_page_and_its_pictures_are_those_of_the_model(fresh: Path, place: str) -> None:
    committed = DOCS / (PAGE.name if place == "page" else place)
    # Colours are made of the numbers beside them.
    now, then = (
        re.sub(r"fill='#\w+'", "", path.read_text("utf-8"))
        for path in (fresh / committed.relative_to(DOCS), committed)
    )
    assert NUMBER.sub("#", now) == NUMBER.sub("#", then)
    # Another processor may round otherwise.
    numbers, expected = (np.array(NUMBER.findall(text), np.float64) for text in (now, then))
    np.testing.assert_allclose(numbers, expected, rtol=1e-3, atol=2e-4)


def test_the_page_shows_every_picture() -> None:
    page = PAGE.read_text("utf-8")
    assert len(PICTURES) == 6
    for picture in PICTURES:
        assert f"](pictures/{picture.name})" in page
