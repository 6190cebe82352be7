"""`attnlens attend --image`, with a single map or a grid of layers and heads."""

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.image import imread

from attnlens_cli.show import picture
from attnlens_cli.show.attention_map import AttentionMap
from attnlens_cli.show.picture import write_picture
from attnlens_client import AttentionQuery, Client
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]
Fetch = Callable[..., AttentionMap]


@pytest.fixture
def attend(run: Run, minilm_server: ServerProcess) -> Run:
    def run_attend(*args: object) -> subprocess.CompletedProcess[str]:
        return run("attend", *args, "--address", minilm_server.address)

    return run_attend


@pytest.fixture
def fetch(minilm_server: ServerProcess) -> Fetch:
    """Return the weights of a text for the given query options."""

    def fetch_map(text: str, **options: object) -> AttentionMap:
        with Client(minilm_server.address) as client:
            [result] = client.encode([text], attention=AttentionQuery(**options))  # type: ignore[arg-type]
            return AttentionMap(texts={"text": text}, model=client.get_model(), result=result)

    return fetch_map


def _size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_png_has_one_map_or_a_grid_of_maps(attend: Run, tmp_path: Path) -> None:
    one, grid = tmp_path / "one.png", tmp_path / "grid.png"
    result = attend("It rained.", "--image", one, "--layer", "3", "--head", "1")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == f"{one}: all-MiniLM-L6-v2, layer 3 of 0-5, head 1, 5 tokens\n"
    result = attend("It rained.", "--image", grid, "--layer", "all", "--head", "all", "--scale", "linear")
    assert result.stderr == f"{grid}: all-MiniLM-L6-v2, 6 layers, 12 heads, 5 tokens\n"
    assert all(450 <= length <= 900 for length in _size(one))
    width, height = _size(grid)
    assert 1.7 < width / height < 2.2
    assert sorted(tmp_path.iterdir()) == [grid, one]


def test_long_text_keeps_the_image_size_and_reports_omitted_tokens(attend: Run, tmp_path: Path) -> None:
    picture = tmp_path / "map.png"
    result = attend("word " * 300, "--truncate", "--image", picture)
    assert "the first 256 tokens of 302" in result.stderr
    assert "one token in 4 has a label" in result.stderr
    assert all(256 * 5 < length < 256 * 9 for length in _size(picture))


def test_svg_keeps_tokens_as_text_if_no_installed_font_has_them(fetch: Fetch, tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    letter = "\U00012000"  # a cuneiform sign
    note = write_picture(fetch(f"{letter} $x$ <b>", layers=[0], heads=[0]), path, "sqrt")
    if note:
        assert note == f"; no installed font has {letter}: viewers' fonts are used"
        words = "".join(ET.parse(path).getroot().itertext())
        assert letter in words
        assert "$x$ <b>" in words
    before = path.read_bytes()
    write_picture(fetch(f"{letter} $x$ <b>", layers=[0], heads=[0]), path, "sqrt")
    assert path.read_bytes() == before


def test_missing_glyphs_in_a_png_are_reported_with_the_remedy(fetch: Fetch, tmp_path: Path) -> None:
    attention = fetch("it \U0010fffd", layers=[0], heads=[0])  # private use: no font has a glyph for it
    note = write_picture(attention, tmp_path / "map.png", "sqrt")
    assert note.startswith("; no installed font has \U0010fffd: shown as boxes; install a font")


def test_fallback_font_is_found_for_missing_glyphs() -> None:
    of_stix = picture._characters(picture._plain_fonts()["STIXGeneral"])
    lacking = min(of_stix - picture._characters(font_manager.findfont(picture._DEFAULT_FONT)))
    families, missing = picture.font_families(["plain", lacking])
    assert (families[0], len(families), missing) == (picture._DEFAULT_FONT, 2, "")
    assert picture.font_families(["plain \u200d"]) == ([picture._DEFAULT_FONT], "")


@pytest.mark.parametrize("scale", ["sqrt", "linear"])
def test_larger_weight_is_a_darker_color(fetch: Fetch, scale: picture.Scale) -> None:
    attention = fetch("It rained.", layers=[0])
    norm, colormap = picture._colormap(attention, scale)
    weights = np.linspace(0, attention.largest, 50)
    colors = np.asarray(colormap(norm(weights)))[:, :3]
    assert (colors[0] == 1).all()
    assert (np.diff(colors @ [0.2126, 0.7152, 0.0722]) < 0).all()
    small = attention.largest / 100
    assert norm(small) == pytest.approx({"sqrt": 0.1, "linear": 0.01}[scale])


def test_map_shows_each_weight_at_its_row_and_column(fetch: Fetch, tmp_path: Path) -> None:
    attention = fetch("It rained, so it was wet.", layers=[0], heads=[2])  # attention to the previous token
    path = tmp_path / "map.png"
    write_picture(attention, path, "linear")
    dark = np.asarray(imread(path))[..., :3].max(axis=-1) < 0.1  # darker than text
    rows, columns = np.nonzero(dark)
    left = columns < dark.shape[1] * 0.8  # exclude the color bar
    assert np.corrcoef(rows[left], columns[left])[0, 1] > 0.9
