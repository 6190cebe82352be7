"""Comparison beyond the parity grid: each of the three parts can fail."""

import dataclasses
import os
from pathlib import Path

import pytest

from attnlens_export.contents import Verdict, measure_graphs
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import ATTENTIONS_PATH, EMBEDDINGS_PATH
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.parity import long_context
from attnlens_export.parity.grid import Case, Padding, full_grid
from attnlens_export.parity.long_context import (
    longest_length,
    measure_long_context,
    memory_limit,
    one_head_config,
)
from attnlens_export.parity.measure import Subject, measure_parity
from attnlens_export.parity.stored import References
from attnlens_export.progress import no_progress
from attnlens_model import Encoder, EncoderConfig, new_encoder
from configs import changed, small_config

WINDOW = 24
GRID_TOKENS = 16
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def config() -> EncoderConfig:
    """Rotary, and a window that no text of the grid exceeds."""
    rotary = {"positions.scheme": "none", "attention.rotary.theta": 500.0}
    return small_config(rotary | {"attention.window": WINDOW, "num_layers": 1})


@pytest.fixture(scope="module")
def encoder(config: EncoderConfig) -> Encoder:
    return new_encoder(config, 0)


@pytest.fixture(scope="module")
def traced(encoder: Encoder, config: EncoderConfig) -> TracedGraph:
    return trace(encoder, config)


@pytest.fixture(scope="module")
def without_window(encoder: Encoder, config: EncoderConfig) -> TracedGraph:
    """The same weights; equal to `traced` for texts of up to 25 tokens."""
    wrong = changed(config, {"attention.window": None})
    other = new_encoder(wrong, 0)
    other.load_state_dict(encoder.state_dict())
    return trace(other, wrong)


def write(traced: TracedGraph, directory: Path) -> Path:
    (directory / "onnx").mkdir()
    embeddings = embeddings_graph(traced)
    write_embedded(directory / EMBEDDINGS_PATH, embeddings.proto, embeddings.weights)
    write_embedded(directory / ATTENTIONS_PATH, traced.proto, traced.weights)
    return directory


def measure(subject: Subject, tracer: long_context.Tracer = trace) -> Verdict:
    def progress(_detail: str, _done: int, _total: int) -> None:
        """Ignore it."""

    parity = measure_parity(subject, [EMBEDDINGS_PATH], progress)
    assert parity.passed
    return Verdict(parity, long_context=measure_long_context(subject, parity, progress, tracer))


def subject_of(directory: Path, encoder: Encoder, config: EncoderConfig) -> Subject:
    return Subject(directory, References(encoder), config, "test", full_grid(GRID_TOKENS))


def test_correct_graph_passes_and_the_manifest_states_how_far_it_was_compared(
    encoder: Encoder, config: EncoderConfig, traced: TracedGraph, tmp_path: Path
) -> None:
    subject = subject_of(write(traced, tmp_path), encoder, config)
    verdict = measure(subject)
    assert verdict.passed
    message = verdict.to_message().long_context
    assert (message.max_tokens, message.hidden_states_tokens, message.probe_tokens) == (40, 40, 40)
    assert 0 < message.hidden_states_error <= 1e-5
    assert 0 < message.probe_error <= 1e-5


def test_window_that_is_wrong_beyond_the_grid_only_fails(
    encoder: Encoder, config: EncoderConfig, without_window: TracedGraph, tmp_path: Path
) -> None:
    verdict = measure(subject_of(write(without_window, tmp_path), encoder, config))
    assert not verdict.passed
    assert not verdict.to_message().passed
    [line] = verdict.failures()
    assert line.startswith("onnx/model.onnx: error of hidden states on 1x40 is ")


def test_mask_rule_that_is_traced_wrongly_fails_where_hidden_states_are_not_reached(
    encoder: Encoder,
    config: EncoderConfig,
    traced: TracedGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_context, "MAX_SCORE_BYTES", 4 * config.num_heads * 20**2)

    def drop_window(probe: Encoder, config: EncoderConfig) -> TracedGraph:
        wrong = changed(config, {"attention.window": None})
        other = new_encoder(wrong, 0)
        other.load_state_dict(probe.state_dict())
        return trace(other, wrong)

    verdict = measure(subject_of(write(traced, tmp_path), encoder, config), drop_window)
    assert verdict.long_context is not None
    assert verdict.long_context.message.hidden_states_tokens == 20
    [line] = verdict.failures()
    assert "error of positions in a one-head encoder on 1x40 is " in line
    [remark] = verdict.long_context.remarks
    assert "compared up to 20 of 40 tokens, positions with one head up to 40;" in remark


def test_rotary_table_that_is_wrong_at_its_last_position_is_rejected(
    encoder: Encoder, config: EncoderConfig, traced: TracedGraph, tmp_path: Path
) -> None:
    weights = dict(traced.weights)
    [name] = [name for name in weights if name.endswith("rotary.sines")]
    table = weights[name].copy()
    table[-1, 0] += 1e-7
    wrong = dataclasses.replace(traced, weights=weights | {name: table})
    subject = Subject(write(wrong, tmp_path), References(encoder), config, "test", [Case(1, 7, Padding.NONE)])
    with pytest.raises(GraphError, match=r"the table shared\.0\.rotary\.sines .* differs from the encoder's"):
        measure_graphs(subject, {}, no_progress, beyond_grid=False)


def test_nothing_is_left_to_compare_where_the_grid_reaches_the_longest_input(
    encoder: Encoder, config: EncoderConfig, traced: TracedGraph, tmp_path: Path
) -> None:
    subject = dataclasses.replace(
        subject_of(write(traced, tmp_path), encoder, config),
        cases=[Case(1, MAX_TOKENS, Padding.NONE)],
    )
    assert measure(subject).long_context is None


def test_one_head_encoder_has_a_layer_for_each_kind_of_attention_and_the_same_positions() -> None:
    pattern = [
        {"kind": "softmax", "num_heads": 4, "rotary": {"theta": 500.0}},
        {"kind": "softmax", "num_heads": 4, "num_key_value_heads": 2, "rotary": {"theta": 10.0}, "window": 5},
    ]
    values = {"positions.scheme": "none", "attention": pattern, "num_layers": 5, "is_causal": True}
    probe = one_head_config(small_config(values))
    assert probe is not None
    assert (probe.hidden_size, probe.num_layers, probe.num_heads, probe.is_causal) == (12, 2, 1, True)
    rotary = [(layer.rotary.theta, layer.window) for layer in probe.layer_attentions]  # type: ignore[attr-defined]
    assert rotary == [(500.0, None), (10.0, 5)]
    assert probe.max_tokens == MAX_TOKENS


def test_scores_of_twelve_heads_fit_the_limit_and_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config({"attention.num_heads": 12})
    for num_bytes, tokens in ((32 * 2**30, 2364), (2**30, 1831)):
        monkeypatch.setattr(long_context, "memory_limit", lambda num_bytes=num_bytes: num_bytes)
        assert longest_length(config) == tokens


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("memory.max", "1048576\n", 2**20),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "1048576\n", 2**20),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
    ],
)
def test_memory_limit_is_that_of_the_container_or_machine(
    name: str, content: str, expected: int | None, tmp_path: Path
) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limit(tmp_path) == machine
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert memory_limit(tmp_path) == (expected or machine)
