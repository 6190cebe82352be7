"""Lessons on every attention mechanism."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from attnlens.patterns import Band, BlockTable
from attnlens_analysis.teach import HeadTrace, make_lesson, trace_head
from attnlens_analysis.teach.graph import DIFFERENCES
from attnlens_analysis.teach.numbers import softmax
from attnlens_analysis.teach.render import as_html, as_markdown, as_text
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_model import Encoder, EncoderConfig, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS
from small_bundles import TOKENIZERS

SENTENCE = "It rained, so the street was wet, and the children could not play on it."
LAYERS = (
    {"kind": "longformer", "num_heads": 4, "window": 2, "num_global_tokens": 1},
    {"kind": "big_bird", "num_heads": 4, "block_size": 4, "num_random_blocks": 1, "table_tokens": 64},
    {"kind": "overlapping", "num_heads": 4, "overlap": 2},
    {"kind": "mixture", "num_heads": 4, "shared_heads": 1, "active_heads": 2},
    {"kind": "composed", "num_heads": 4},
    {"kind": "disentangled", "num_heads": 4, "terms": "c2p|p2c"},
    {"kind": "softmax", "num_heads": 4, "num_key_value_heads": 2, "rotary": {"theta": 100.0}},
)
KINDS = [str(layer["kind"]) for layer in LAYERS]
CONFIG = EncoderConfig.from_dict(
    {
        "family": "attnlens",
        "hidden_size": 24,
        "num_layers": len(LAYERS),
        "embeddings": {"vocab_size": 400},
        "positions": {"max_position_embeddings": 64},
        "attention": LAYERS,
        "feed_forward": {"intermediate_size": 20},
    }
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mechanisms") / "bundle"
    tokenizer = TOKENIZERS / "wordpiece" / "tokenizer.json"
    export_bundle(CONFIG, directory, ExportOptions(seed=3, grid=small_grid(16), tokenizer=tokenizer))
    return directory


@pytest.fixture(scope="module", params=range(len(LAYERS)), ids=KINDS)
def trace(request: pytest.FixtureRequest, bundle: Path) -> HeadTrace:
    return trace_head(bundle, SENTENCE, "rained", layer=request.param, head=1)


def test_every_mechanism_is_covered() -> None:
    assert set(KINDS) == set(ATTENTION_KINDS)
    assert set(DIFFERENCES) == set(KINDS) - {"softmax"}


def test_lesson_has_all_steps_with_finite_numbers(trace: HeadTrace) -> None:
    lesson = make_lesson(trace, "attnlens teach")
    assert len(lesson.steps) == 19
    assert (trace.mechanism in lesson.introduction[-1]) == (trace.mechanism != "softmax")
    for form in (as_text(lesson, 80), as_markdown(lesson), as_html(lesson)):
        assert not {"nan", "inf", "-inf"} & set(re.findall(r"[\w.-]+", form))


def test_values_match_pytorch(trace: HeadTrace) -> None:
    encoder: Encoder = new_encoder(CONFIG, seed=3).eval()
    layer = encoder.layers[trace.layer].get_submodule("attention")
    ids = torch.from_numpy(trace.sentence.input_ids)
    outputs: list[torch.Tensor] = []
    layer.register_forward_hook(lambda *args: outputs.append(args[2][0]))
    with torch.inference_mode():
        [weights] = encoder(ids, torch.ones_like(ids), output_attentions=True).attentions[trace.layer]
    dense = weights.numpy()
    match CONFIG.layer_outputs(trace.layer)[0].pattern:
        case Band() as band:
            dense = band.dense(dense)
        case BlockTable() as table:
            dense = table.at(dense.shape[1]).dense(dense)
    np.testing.assert_allclose(trace.values.weights, dense, atol=2e-6)
    np.testing.assert_allclose(trace.values.output, outputs[0][0], atol=2e-5)


def test_terms_explain_the_weights(trace: HeadTrace) -> None:
    values = trace.values
    np.testing.assert_allclose(softmax(values.scores, values.allowed), values.weights, atol=1e-6)
    plain = np.abs(softmax(values.products, values.allowed) - values.weights)[:, 5:].max()
    # Only these add terms to q.k in rows of tokens that are not global.
    assert (plain > 1e-5) == (trace.mechanism in {"big_bird", "composed", "disentangled"})


def test_padding_gets_no_weight(trace: HeadTrace) -> None:
    assert trace.padded is not None
    assert trace.padded[len(trace.sentence) :].max() == 0
    assert trace.padded.sum() == pytest.approx(1, abs=1e-6)
