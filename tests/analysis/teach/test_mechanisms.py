"""Lessons on every attention mechanism."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlens.patterns import Band, BlockTable
from attnlens_analysis.teach import HeadTrace, make_lesson, trace_head
from attnlens_analysis.teach.content import Bars, Grid
from attnlens_analysis.teach.graph import DIFFERENCES
from attnlens_analysis.teach.numbers import softmax
from attnlens_analysis.teach.render import as_html, as_markdown, as_text, picture
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_model import Encoder, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS
from mechanisms import LAYERS, config_with, mechanism_config
from small_bundles import TOKENIZERS

SENTENCE = "It rained, so the street was wet, and the children could not play on it."
OTHERS: list[dict[str, Any]] = [
    {"kind": "disentangled", "num_heads": 4, "terms": "c2p|p2c"},
    {"kind": "softmax", "num_heads": 4, "num_key_value_heads": 2, "rotary": {"theta": 100.0}},
]
CONFIGS = {name: mechanism_config(name) for name in LAYERS} | {"others": config_with(OTHERS)}
# One layer of each kind.
LAYER_OF = {
    str(layer.kind): (name, index)
    for name, config in CONFIGS.items()
    for index, layer in reversed(list(enumerate(config.layer_attentions)))
}
KINDS = list(LAYER_OF)

Trace = Callable[..., HeadTrace]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def export(name: str) -> Path:
        directory = tmp_path_factory.mktemp("mechanisms") / "bundle"
        tokenizer = TOKENIZERS / "wordpiece" / "tokenizer.json"
        options = ExportOptions(seed=3, grid=small_grid(16), tokenizer=tokenizer)
        export_bundle(CONFIGS[name], directory, options)
        return directory

    return functools.cache(export)


@pytest.fixture(scope="module")
def trace_of(bundle: Callable[[str], Path]) -> Trace:
    """Return a function that traces a head of the layer of a kind."""

    @functools.cache
    def trace(kind: str, head: int | None = 1) -> HeadTrace:
        name, layer = LAYER_OF[kind]
        return trace_head(bundle(name), SENTENCE, "rained", layer=layer, head=head)

    return trace


@pytest.fixture(params=KINDS)
def trace(request: pytest.FixtureRequest, trace_of: Trace) -> HeadTrace:
    return trace_of(request.param)


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
    config = CONFIGS[LAYER_OF[trace.mechanism][0]]
    encoder: Encoder = new_encoder(config, seed=3).eval()
    layer = encoder.layers[trace.layer].get_submodule("attention")
    ids = torch.from_numpy(trace.sentence.input_ids)
    outputs: list[torch.Tensor] = []
    layer.register_forward_hook(lambda *args: outputs.append(args[2][0]))
    with torch.inference_mode():
        [weights] = encoder(ids, torch.ones_like(ids), output_attentions=True).attentions[trace.layer]
    dense = weights.numpy()
    match config.layer_outputs(trace.layer)[0].pattern:
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


def test_inactive_head_of_a_mixture_contributes_nothing(trace_of: Trace) -> None:
    trace = trace_of("mixture")
    gates = trace.values.gates
    assert gates is not None
    [inactive] = np.flatnonzero(gates[trace.row] == 0)  # one shared and two of the other three are active
    lesson = make_lesson(replace(trace, head=int(inactive)), "attnlens teach")
    steps = {step.key: step for step in lesson.steps}
    sentence = f"Head {inactive} is inactive for “{trace.label(trace.row)}”: its gate is 0"
    for text in (lesson.introduction[-1], *(" ".join(steps[key].text) for key in ("softmax", "values"))):
        assert sentence in text
    table, chart = steps["output"].table, steps["output"].picture
    assert table is not None
    assert [row[0] for row in table.rows if row[0].endswith("inactive")] == [f"head {inactive}, inactive"]
    assert isinstance(chart, Bars)
    assert [value == 0 for value in chart.values] == [head == inactive for head in range(4)]
    assert trace_of("mixture", None).head != inactive


def test_lesson_of_composed_heads_shows_weights_before_and_after(trace_of: Trace) -> None:
    trace = trace_of("composed")
    values, row = trace.values, trace.row
    assert values.composed is not None
    np.testing.assert_allclose(values.context, values.composed @ values.value, atol=1e-6)
    step = {step.key: step for step in make_lesson(trace, "attnlens teach").steps}["values"]
    assert isinstance(step.picture, Grid)
    np.testing.assert_allclose(step.picture.values, [values.weights[1, row], values.composed[1, row]])
    assert step.table is not None
    assert step.table.headings[1:3] == ("before composition", "composed a_j")


def test_query_matrix_of_overlapping_heads_has_one_shape(trace_of: Trace) -> None:
    trace = trace_of("overlapping", 0)
    assert trace.head_matrices is not None
    (query, query_bias), _ = trace.head_matrices
    steps = {step.key: step for step in make_lesson(trace, "attnlens teach").steps}
    assert steps["shapes"].table is not None
    assert ("W_Q, W_K, W_V per head", "[D, d_k]", str(list(query.shape))) in steps["shapes"].table.rows
    assert f"W_Q of this head has the shape {list(query.shape)}" in steps["heads"].text[0]
    assert "6 are its own and 2 belong to each adjacent head" in " ".join(steps["shapes"].text)
    np.testing.assert_allclose(trace.values.entering @ query + query_bias, trace.values.query[0], atol=1e-5)


def test_negative_bars_point_left() -> None:
    bars = Bars("Terms", ["a", "b"], [2.0, -1.0])
    starts = [float(found) for found in re.findall(r"<rect x='([\d.]+)' y", picture(bars))]
    widths = [float(found) for found in re.findall(r"width='([\d.]+)' height='14'", picture(bars))]
    assert starts[1] + widths[1] == pytest.approx(starts[0], abs=0.1)


def test_lesson_contains_no_markup(trace: HeadTrace) -> None:
    assert "`" not in as_html(make_lesson(trace, "attnlens teach"))
