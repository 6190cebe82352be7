"""Parity: the grid, the measures, and that each gate can fail."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attention_mistakes import ATTENTION as ATTENTION_KINDS
from attnlens_export.contents import Verdict
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.parity import measure as parity
from attnlens_export.parity.grid import (
    Case,
    Inputs,
    Padding,
    default_grid,
    full_grid,
    make_inputs,
    small_grid,
)
from attnlens_export.parity.long_context import longest_length
from attnlens_export.parity.measure import Subject, measure_parity, run_case
from attnlens_export.parity.reference import Tensors, allowed_error, difference
from attnlens_export.parity.sessions import Graph
from attnlens_export.parity.stored import References
from attnlens_export.report import write_report
from attnlens_export.results import Result
from attnlens_model import Encoder, EncoderConfig, new_encoder
from attnlens_model.attention.own_module import OWN_MODULE
from configs import changed, small_config

Change = Callable[[Tensors, Inputs], None]


class TamperedGraph(Graph):
    """A graph whose outputs are changed before they are compared."""

    change: Change

    def run(self, inputs: Inputs) -> Tensors:
        changed = {name: tensor.copy() for name, tensor in super().run(inputs).items()}
        self.change(changed, inputs)
        return changed


@pytest.fixture
def graph_dir(tiny_trace: TracedGraph, tmp_path: Path) -> Path:
    embeddings = embeddings_graph(tiny_trace)
    write_embedded(tmp_path / "model.onnx", tiny_trace.proto, tiny_trace.weights)
    write_embedded(tmp_path / "embeddings.onnx", embeddings.proto, embeddings.weights)
    return tmp_path


def measure(
    encoder: Encoder, config: EncoderConfig, directory: Path, cases: list[Case], *graphs: str
) -> Result:
    subject = Subject(directory, References(encoder), config, "test", cases)
    return measure_parity(subject, graphs or ["model.onnx"], lambda _detail, _done, _total: None)


def test_grid_is_the_documented_one() -> None:
    assert [str(case) for case in full_grid(512, [64, 300])] == [
        "1x1 none",
        "8x9 empty_row",
        "8x16 middle",
        "8x33 left",
        "2x128 left",
        "1x512 none",
        "3x65 steps",
        "2x64 left",
        "3x301 steps",
        "2x300 left",
    ]


@pytest.mark.parametrize("max_length", [1, 2, 9, 40, 128, 8192])
def test_grid_has_the_same_cases_up_to_any_longest_input(max_length: int) -> None:
    grid = full_grid(max_length, [20, 128])
    assert len(set(grid)) == len(grid)
    assert max(case.length for case in grid) == max_length
    assert {case.padding for case in grid} >= {Padding.NONE, Padding.EMPTY_ROW, Padding.MIDDLE, Padding.LEFT}
    assert {case.batch_size for case in grid} >= {1, 2, 8}


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_grid_has_at_most_twelve_cases(kind: str) -> None:
    config = changed(
        small_config({"family": "attnlens", "hidden_size": 24}), {"attention": ATTENTION_KINDS[kind]}
    )
    assert 6 <= len(default_grid(config)) <= 12


def test_texts_on_both_sides_of_an_edge_share_a_batch(tiny_config: EncoderConfig) -> None:
    cases = [case for case in full_grid(40, [1, 20, 40]) if case.padding is Padding.STEPS]
    counts = [make_inputs(case, tiny_config).attention_mask.sum(axis=1).tolist() for case in cases]
    assert counts == [[2, 1, 1], [21, 20, 19]]


def test_single_tokens_have_no_padding_unless_the_whole_text_is_padding(tiny_config: EncoderConfig) -> None:
    counts = {
        case.padding: make_inputs(case, tiny_config).attention_mask.sum(axis=1).tolist()
        for case in full_grid(1)
    }
    assert counts[Padding.EMPTY_ROW] == [1, 0, *[1] * 6]
    assert counts[Padding.MIDDLE] == [1] * 8
    assert counts[Padding.LEFT] == [1] * 2


def test_inputs_are_reproducible_and_padded_as_named(tiny_config: EncoderConfig) -> None:
    for case in full_grid(40):
        inputs, again = make_inputs(case, tiny_config), make_inputs(case, tiny_config)
        mask = inputs.attention_mask
        assert np.array_equal(inputs.input_ids, again.input_ids)
        assert np.array_equal(mask, again.attention_mask)
        assert inputs.input_ids.dtype == mask.dtype == np.int64
        assert inputs.input_ids.max() < tiny_config.embeddings.vocab_size
        assert (inputs.input_ids[mask == 0] == tiny_config.embeddings.pad_token_id).all()
        assert mask[0].all()
        counts = mask.sum(axis=1)
        if case.padding is Padding.EMPTY_ROW:
            assert counts[1] == 0
        elif case.padding is not Padding.NONE:
            assert (counts[1:] >= 1).all()
            assert (counts[1:] < case.length).all()
        if case.padding is Padding.LEFT:
            assert mask[:, -1].all()
        if case.padding in (Padding.RIGHT, Padding.MIDDLE):
            assert mask[:, 0].all()
    middles = [make_inputs(case, tiny_config) for case in full_grid(40) if case.padding is Padding.MIDDLE]
    assert any((np.diff(each.attention_mask) > 0).any() for each in middles), "no text goes on behind padding"


def test_inputs_use_nearly_the_whole_vocabulary_and_every_token_type(tiny_config: EncoderConfig) -> None:
    inputs = [make_inputs(case, tiny_config) for case in full_grid(40)]
    live = np.concatenate([each.input_ids[each.attention_mask == 1] for each in inputs])
    assert len(set(live.tolist())) >= 0.95 * tiny_config.embeddings.vocab_size
    assert {0, tiny_config.embeddings.vocab_size - 1} <= set(live.tolist())
    for each in inputs:
        assert each.token_type_ids is not None
        if each.input_ids.size >= 33:
            assert len(set(each.input_ids[0].tolist())) > 2
            assert set(each.token_type_ids.ravel().tolist()) == {0, 1}


def test_shortest_text_is_the_one_that_runs_alone(
    tiny_encoder: Encoder, tiny_config: EncoderConfig, graph_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the empty one, which has nothing to compare."""
    seen: list[int] = []

    def note(_outputs: Tensors, inputs: Inputs) -> None:
        if len(inputs.attention_mask) == 1:
            seen.append(int(inputs.attention_mask.sum()))

    monkeypatch.setattr(TamperedGraph, "change", staticmethod(note), raising=False)
    monkeypatch.setattr(parity, "Graph", TamperedGraph)
    cases = [Case(8, 33, Padding.RIGHT), Case(8, 33, Padding.LEFT), Case(3, 33, Padding.EMPTY_ROW)]
    assert measure(tiny_encoder, tiny_config, graph_dir, cases).passed
    counts = [make_inputs(case, tiny_config).attention_mask.sum(axis=1) for case in cases]
    assert seen == [int(each[each > 0].min()) for each in counts]


def test_difference_is_found_where_it_is_and_padding_is_omitted() -> None:
    generator = np.random.default_rng(0)
    live = np.array([[True, False, True], [False, True, True]])
    hidden = generator.random((2, 3, 5))
    changed = hidden.copy()
    changed[0, 1] += 100
    changed[1, 2, 4] += 0.5
    found = difference(changed, hidden, live)
    assert found.index == (1, 2, 4)
    assert found.max_abs == pytest.approx(0.5)
    assert found.mean_abs == pytest.approx(0.5 / 20)
    assert found.values == (changed[1, 2, 4], hidden[1, 2, 4])
    assert found.count == 20
    assert found.min_cosine < 1

    weights = generator.random((2, 4, 3, 3))
    changed = weights.copy()
    changed[1, 3, 0] += 100
    changed[0, 3, 2, 1] -= 0.25
    found = difference(changed, weights, live)
    assert found.index == (0, 3, 2, 1)
    assert found.max_abs == pytest.approx(0.25)
    assert found.count == 4 * 4 * 3


def test_good_graph_passes(tiny_encoder: Encoder, tiny_config: EncoderConfig, graph_dir: Path) -> None:
    result = measure(tiny_encoder, tiny_config, graph_dir, full_grid(40))
    assert result.passed
    assert result.failures() == []
    assert {errors.role for errors in result.errors} == {"last_hidden_state", "attention_weights"}
    for each in result.errors:
        # The softmax of a single token is 1 in any arithmetic.
        lowest = -1.0 if each.num_tokens == 1 else 0.0
        assert lowest < each.max_abs_error < 1e-5
        assert lowest < each.max_abs_error_float64 < 1e-5
        assert each.mean_abs_error <= each.p99_abs_error <= each.max_abs_error
        assert each.min_cosine > 1 - 1e-6


def raise_one_weight(outputs: Tensors, inputs: Inputs) -> None:
    if inputs.input_ids.shape == (2, 7):
        outputs["attentions.1"][0, 2, 4, 3] += 1e-3


def lose_a_number(outputs: Tensors, _inputs: Inputs) -> None:
    outputs["last_hidden_state"][0, 0, 0] = np.nan


def break_padding(outputs: Tensors, inputs: Inputs) -> None:
    outputs["last_hidden_state"][inputs.attention_mask == 0] = np.inf


def leak_to_padding(outputs: Tensors, inputs: Inputs) -> None:
    outputs["attentions.1"].transpose(0, 3, 1, 2)[inputs.attention_mask == 0] = 1e-12


def fill_empty_rows(outputs: Tensors, inputs: Inputs) -> None:
    outputs["attentions.1"][~inputs.attention_mask.any(axis=1)] = 1 / inputs.attention_mask.shape[1]


def stretch_rows(outputs: Tensors, _inputs: Inputs) -> None:
    outputs["attentions.1"][...] *= 1.001


def lose_a_weight(outputs: Tensors, inputs: Inputs) -> None:
    """Of a padded query, which no comparison looks at."""
    outputs["attentions.1"].transpose(0, 2, 1, 3)[inputs.attention_mask == 0] = np.nan


def depend_on_the_batch(outputs: Tensors, inputs: Inputs) -> None:
    outputs["last_hidden_state"][...] += 6e-6 if len(inputs.input_ids) > 1 else -6e-6


TAMPERINGS = {
    "attention": (raise_one_weight, "attentions.1[0, 2, 4, 3] is "),
    "NaN": (lose_a_number, "last_hidden_state[0, 0, 0] is nan, PyTorch returns "),
    "infinite padding": (break_padding, "number of outputs with NaN or infinity on "),
    "infinite attention": (lose_a_weight, "number of outputs with NaN or infinity on "),
    "leak": (leak_to_padding, "attention weight of a masked token on 2x7 left is 1e-12 (limit 0)"),
    "empty row": (fill_empty_rows, "attention weight in a text without tokens on 3x7 empty_row is "),
    "row sums": (stretch_rows, "deviation of a row sum from 1 on "),
    "batch": (
        depend_on_the_batch,
        "max batch difference of last_hidden_state on 2x7 left is 1.2e-05 (limit 1e-05)",
    ),
}


@pytest.mark.parametrize(("change", "message"), TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_every_gate_can_fail(
    change: Change,
    message: str,
    tiny_encoder: Encoder,
    tiny_config: EncoderConfig,
    graph_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TamperedGraph, "change", staticmethod(change), raising=False)
    monkeypatch.setattr(parity, "Graph", TamperedGraph)
    result = measure(tiny_encoder, tiny_config, graph_dir, small_grid(40))
    assert not result.passed
    assert not Verdict(result).to_message().passed
    assert any(message in line for line in result.failures()), result.failures()
    assert all(line.startswith("model.onnx: ") for line in result.failures())


def test_text_that_is_nan_alone_fails(
    tiny_encoder: Encoder, tiny_config: EncoderConfig, graph_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_what_is_alone(outputs: Tensors, inputs: Inputs) -> None:
        if len(inputs.input_ids) == 1:
            outputs["last_hidden_state"][...] = np.nan

    monkeypatch.setattr(TamperedGraph, "change", staticmethod(lose_what_is_alone), raising=False)
    monkeypatch.setattr(parity, "Graph", TamperedGraph)
    result = measure(tiny_encoder, tiny_config, graph_dir, [Case(2, 7, Padding.LEFT)])
    assert not result.passed
    expected = "model.onnx: max batch difference of last_hidden_state on 2x7 left is nan (limit 1e-05)"
    assert result.failures() == [expected]


def test_causal_encoder_must_not_look_ahead(
    tiny_config: EncoderConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(tiny_config, {"is_causal": True})
    encoder = new_encoder(config, seed=0)
    graph = trace(encoder, config)
    write_embedded(tmp_path / "model.onnx", graph.proto, graph.weights)
    assert measure(encoder, config, tmp_path, small_grid(40)).passed

    def look_ahead(outputs: Tensors, inputs: Inputs) -> None:
        if inputs.attention_mask.all() and inputs.attention_mask.shape[1] > 1:
            outputs["attentions.1"][0, 0, 0, 1] = 1e-12

    monkeypatch.setattr(TamperedGraph, "change", staticmethod(look_ahead), raising=False)
    monkeypatch.setattr(parity, "Graph", TamperedGraph)
    failures = measure(encoder, config, tmp_path, small_grid(40)).failures()
    assert failures == ["model.onnx: attention weight of a masked token on 1x7 none is 1e-12 (limit 0)"]


ATTENTION: dict[str, object] = {"kind": "softmax", "num_heads": 4}


def test_local_layer_must_not_look_out_of_its_window(tiny_config: EncoderConfig, tmp_path: Path) -> None:
    """Not even by a weight that no comparison would notice."""
    config = changed(tiny_config, {"attention": [ATTENTION, ATTENTION | {"window": 2}]})
    encoder = new_encoder(config, seed=0)
    traced = trace(encoder, config)
    write_embedded(tmp_path / "model.onnx", traced.proto, traced.weights)
    cases = [Case(1, 7, Padding.NONE), Case(3, 7, Padding.LEFT), Case(3, 7, Padding.EMPTY_ROW)]
    assert measure(encoder, config, tmp_path, cases).passed

    def look_too_far(layer: int) -> Change:
        def change(outputs: Tensors, _inputs: Inputs) -> None:
            outputs[f"attentions.{layer}"][0, 1, 6, 3] = 1e-12

        return change

    graph = TamperedGraph(tmp_path, "model.onnx")
    case = cases[0]
    found = []
    for layer in (0, 1):
        graph.change = look_too_far(layer)
        run = run_case(graph, case, make_inputs(case, config), config)
        found += [each.value for each in run.comparisons if each.name == "attention weight of a masked token"]
    assert found == [0, pytest.approx(1e-12, rel=1e-6, abs=0)]  # layer 0 is global, layer 1 local


def test_worst_failure_comes_first(
    tiny_encoder: Encoder, tiny_config: EncoderConfig, graph_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(outputs: Tensors, inputs: Inputs) -> None:
        outputs["last_hidden_state"][-1, -1, 7] += len(inputs.input_ids)

    monkeypatch.setattr(TamperedGraph, "change", staticmethod(change), raising=False)
    monkeypatch.setattr(parity, "Graph", TamperedGraph)
    cases = [Case(1, 5, Padding.NONE), Case(8, 9, Padding.LEFT), Case(2, 9, Padding.LEFT)]
    failures = measure(tiny_encoder, tiny_config, graph_dir, cases).failures()
    assert failures[0].startswith("model.onnx: max abs error of last_hidden_state on 8x9 left is ")
    assert ": last_hidden_state[7, 8, 7] is " in failures[0]


def test_gate_is_the_larger_of_the_tolerance_and_four_times_the_error_of_torch() -> None:
    assert allowed_error(1e-6) == 1e-5
    assert allowed_error(1e-4) == 4e-4


def test_maps_that_would_fill_the_memory_are_omitted(
    tiny_encoder: Encoder, tiny_config: EncoderConfig, graph_dir: Path
) -> None:
    cases = [Case(1, 7, Padding.NONE), Case(1, 40, Padding.NONE, with_attentions=False)]
    result = measure(tiny_encoder, tiny_config, graph_dir, cases, "embeddings.onnx", "model.onnx")
    found = {(each.graph, each.num_tokens) for each in result.errors}
    assert found == {("embeddings.onnx", 7), ("embeddings.onnx", 40), ("model.onnx", 7)}
    assert result.passed
    assert "not compared, too large: model.onnx on 1x40 none" in result.remarks
    write_report(graph_dir, Verdict(result), "tiny")
    assert "- not compared, too large: model.onnx on 1x40 none\n" in (graph_dir / "report.md").read_text(
        encoding="utf-8"
    )


def sized(num_layers: int, num_heads: int, max_tokens: int) -> EncoderConfig:
    return small_config(
        {
            "embeddings.vocab_size": 99,
            "hidden_size": num_heads * 64,
            "num_layers": num_layers,
            "attention.num_heads": num_heads,
            "feed_forward.intermediate_size": 7,
            "positions.max_position_embeddings": max_tokens,
        }
    )


def test_grid_of_a_long_context_ends_where_maps_fill_the_memory() -> None:
    """22 layers of 12 heads: 713 tokens are 512 MiB of maps, 1182 128 MiB a layer in float64."""
    grid = default_grid(sized(22, 12, 8192))
    assert [case for case in grid if case.length > 128] == [
        Case(1, 1182, Padding.NONE, with_attentions=False),
        Case(1, 713, Padding.NONE),
    ]
    assert 8 * 12 * 1182**2 <= 2**27 < 8 * 12 * 1183**2
    assert 4 * 22 * 12 * 713**2 <= 2**29 < 4 * 22 * 12 * 714**2


def test_module_that_returns_the_maps_of_all_layers_is_not_compared_beyond_them() -> None:
    """In every run, also in those of hidden states."""
    module = changed(sized(22, 12, 8192), {"attention": [{"kind": OWN_MODULE, "num_heads": 12}] * 22})
    assert max(case.length for case in default_grid(module)) == 713
    assert longest_length(module) < 713 < longest_length(sized(22, 12, 8192))


def test_longest_length_can_be_chosen_up_to_the_encoders_maximum() -> None:
    grid = default_grid(sized(22, 12, 8192), 2000)
    assert max(case.length for case in grid) == 2000
    assert all(case.with_attentions for case in grid)
    assert default_grid(sized(2, 2, 300), 2000) == full_grid(300)


@pytest.mark.parametrize("sizes", [(6, 12, 512), (24, 16, 512), (12, 12, 514), (2, 2, 8)])
def test_grid_of_a_usual_encoder_is_whole(sizes: tuple[int, int, int]) -> None:
    assert default_grid(sized(*sizes)) == full_grid(sizes[2])


def test_nothing_measured_is_not_passed() -> None:
    assert not Result().passed
