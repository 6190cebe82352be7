"""docs/mechanisms.md: its configurations run, with the outputs and tensors that it names; its pictures."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from attnlens.patterns import Band, BlockTable
from attnlens_model import EncoderConfig, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "mechanisms.md").read_text(encoding="utf-8")
SECTIONS = [section for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:] if "```json" in section]
FIRST, *MECHANISMS = SECTIONS
# Others are screenshots.
PICTURES = sorted(path for path in (DOCS / "pictures").glob("*.png") if path.stem in ATTENTION_KINDS)
MAX_PICTURE_BYTES = 60_000
ROW_SUMS = {"one": "1", "unbounded": "any number"}
PLAIN_OUTPUTS = [("attention_weights", "dense", "1")]


def example(section: str) -> Any:
    [block] = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    return json.loads(block)


def configuration(section: str) -> EncoderConfig:
    """The first configuration of the page with the attention of this section."""
    return EncoderConfig.from_dict(example(FIRST) | {"attention": example(section)})


def table(section: str, first_column: str) -> list[tuple[str, ...]]:
    """The rows of the section's table of this name; none if there is no such table."""
    found = re.search(rf"^\| {first_column} \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    lines = found[1].splitlines() if found else []
    return [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in lines]


def named_shapes(section: str) -> dict[str, tuple[int, ...]]:
    """Documented tensors of an encoder."""
    config, attention = configuration(section), example(section)
    letters = {
        "D": config.hidden_size,
        "H": attention["num_heads"],
        "K": config.hidden_size // attention["num_heads"],
        "V": config.embeddings.vocab_size,
        "M": config.positions.max_position_embeddings,
        "F": example(FIRST)["feed_forward"]["intermediate_size"],
        **{key: value for key, value in attention.items() if isinstance(value, int)},
        **attention.get("relative_bias", {}),
    }
    # The rows of the section replace those of all mechanisms. "none" removes a tensor.
    shapes = {row[0]: row[1] for row in (*table(FIRST, "tensor"), *table(section, "tensor"))}
    return {
        name.replace("layers.N", f"layers.{layer}"): eval(shape, {}, letters)
        for name, shape in shapes.items()
        if shape != "none"
        for layer in range(config.num_layers)
    }


def test_every_mechanism_has_a_section() -> None:
    assert {example(section)["kind"] for section in MECHANISMS} == set(ATTENTION_KINDS)


@pytest.mark.parametrize("section", MECHANISMS, ids=lambda section: section.partition("\n")[0])
def test_tensors_of_a_fresh_encoder_are_those_that_the_page_names(section: str) -> None:
    tensors = new_encoder(configuration(section), seed=0).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == named_shapes(section)


@pytest.mark.parametrize("section", MECHANISMS, ids=lambda section: section.partition("\n")[0])
def test_layer_returns_the_documented_outputs(section: str) -> None:
    config = configuration(section)
    said = table(section, "role") or PLAIN_OUTPUTS
    outputs = config.layer_attentions[0].outputs()
    assert [(each.role, each.layout, ROW_SUMS[each.row_sum]) for each in outputs] == said

    ids = torch.arange(1, 49)[None]
    with torch.no_grad():
        result = new_encoder(config, seed=0)(ids, torch.ones_like(ids), output_attentions=True)
    assert result.last_hidden_state.shape == (1, 48, config.hidden_size)
    assert np.isfinite(result.last_hidden_state.numpy()).all()
    for layer in result.layers:
        assert list(layer) == [each.role for each in outputs]
        [first, *_] = outputs
        weights = layer[first.role][0].numpy()
        if isinstance(first.pattern, Band):
            weights = first.pattern.dense(weights)
        if isinstance(first.pattern, BlockTable):
            weights = first.pattern.at(48).dense(weights)
        assert weights.shape == (first.num_heads, 48, 48)
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-5)


def test_every_picture_is_on_the_page_and_small() -> None:
    assert [f"pictures/{path.name}" for path in PICTURES] == sorted(re.findall(r"\]\((pictures/.*?)\)", PAGE))
    assert {path.name for path in PICTURES if path.stat().st_size > MAX_PICTURE_BYTES} == set()


@pytest.mark.extended
def test_pictures_match_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = DOCS / "draw_mechanisms.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in PICTURES]
    for path in PICTURES:
        with Image.open(path) as kept, Image.open(tmp_path / path.name) as drawn:
            assert kept.size == drawn.size
            pixels = [np.asarray(image.convert("RGB"), dtype=np.float64) for image in (kept, drawn)]
        # Another processor may round a colour or two differently.
        assert np.abs(pixels[0] - pixels[1]).mean() < 0.5, path.name
