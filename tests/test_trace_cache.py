"""A cached trace equals a new one, and nothing that could change a trace is served from the cache."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from attnlens_export.graph import simplify
from attnlens_export.graph.trace import TracedGraph, trace
from attnlens_model import Encoder, load_checkpoint, new_encoder
from attnlens_model.attention import softmax
from attnlens_model.attention.kinds import ATTENTION_KINDS
from configs import small_config
from faster_traces import SHORTCUTS, use
from odd_models import OddModel
from toy_attention import ToyAttentionConfig
from trace_cache import TraceCache

pytestmark = pytest.mark.extended  # a test utility

# Tied layers, tables, constants, and views. A cached graph that is wrong for its encoder fails the
# parity check of every export, so other mechanisms are not tested here.
CONFIGS: dict[str, dict[str, Any]] = {
    "tied layers": {"num_hidden_groups": 1, "embeddings.size": 24, "attention.alibi": True},
    "relative and composed": {
        "attention": [
            {"kind": "softmax", "num_heads": 4, "relative_bias": {"num_buckets": 8, "max_distance": 16}},
            {"kind": "composed", "num_heads": 4, "by_key": False, "before_softmax": False},
        ]
    },
}


def assert_equal(found: TracedGraph, expected: TracedGraph) -> None:
    assert found.proto.SerializeToString(deterministic=True) == expected.proto.SerializeToString(
        deterministic=True
    )
    assert list(found.weights) == list(expected.weights)
    for name, array in expected.weights.items():
        assert (found.weights[name].dtype, found.weights[name].strides) == (array.dtype, array.strides)
        assert found.weights[name].tobytes() == array.tobytes(), name
    assert found.shapes == expected.shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_trace_with_other_weights_equals_a_new_one_without_shortcuts(
    name: str, trace_cache: TraceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config({"family": "attnlens", "num_layers": 2} | CONFIGS[name])
    trace(new_encoder(config, seed=0), config)
    count, encoder = trace_cache.traced, new_encoder(config, seed=1)
    cached = trace(encoder, config)
    assert trace_cache.traced == count
    original = [each._replace(faster=each.original) for each in SHORTCUTS]
    use(original, monkeypatch)
    with trace_cache.disabled():
        assert_equal(cached, trace(encoder, config))


def test_cached_trace_has_the_weights_of_the_encoder() -> None:
    config = small_config()
    encoder: Any = new_encoder(config, seed=0)
    cached = trace(encoder, config)
    with torch.no_grad():
        encoder.layers[0].attention.query.weight[3, 5] = 7.0
    assert cached.weights["layers.0.attention.query.weight.T"][5, 3] == 7.0


def change_attribute(encoder: Any) -> None:
    encoder.layers[0].attention.scale = 3.0


def change_buffer(encoder: Encoder) -> None:
    encoder.positions.add_(1)


def change_shape(encoder: Encoder) -> None:
    encoder.embeddings.token.weight.data = torch.zeros(7, 48)


def tie(encoder: Any) -> None:
    encoder.layers[0].output_norm.weight = encoder.layers[1].output_norm.weight


@pytest.mark.parametrize("change", [change_attribute, change_buffer, change_shape, tie])
def test_key_covers_everything_a_trace_reads(
    change: Callable[[Encoder], None], trace_cache: TraceCache
) -> None:
    config = small_config({"is_causal": True})
    encoder = new_encoder(config, seed=0)
    before = trace_cache.key(encoder, config)
    assert trace_cache.key(new_encoder(config, seed=1), config) == before
    change(encoder)
    assert trace_cache.key(encoder, config) not in (before, None)


class Twice(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def replace_module(encoder: Any) -> None:
    encoder.layers[0].feed_forward.up = Twice(48, 56)


def replace_method(encoder: Any) -> None:
    encoder.layers[0].forward = lambda hidden, *_: (hidden, {})


def add_hook(encoder: Encoder) -> None:
    encoder.layers[0].register_forward_hook(lambda *_: None)


def hold_tensor(encoder: Any) -> None:
    encoder.layers[0].attention.scale = torch.ones(())


@pytest.mark.parametrize("change", [replace_module, replace_method, add_hook, hold_tensor])
def test_encoder_with_foreign_modules_is_not_cached(
    change: Callable[[Encoder], None], trace_cache: TraceCache
) -> None:
    encoder = new_encoder(config := small_config(), seed=0)
    change(encoder)
    assert trace_cache.key(encoder, config) is None


def test_transformers_checkpoint_is_cached(trace_cache: TraceCache, tmp_path: Path) -> None:
    """transformers and torch modify torch classes at run time."""
    OddModel("Bert").make().save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert trace_cache.key(checkpoint.encoder, checkpoint.config) is not None


def test_copies_of_an_encoder_are_cached(trace_cache: TraceCache) -> None:
    """copy.deepcopy adds `__slotnames__` to the classes of configurations."""
    encoder = new_encoder(config := small_config(), seed=0)
    assert trace_cache.key(copy.deepcopy(encoder), copy.deepcopy(config)) is not None
    assert trace_cache.patched_modules() == []


def test_mechanism_defined_in_a_test_is_not_cached(trace_cache: TraceCache) -> None:
    with mock.patch.dict(ATTENTION_KINDS, {"toy": ToyAttentionConfig}):
        config = small_config({"attention": {"kind": "toy", "num_heads": 3}})
        encoder = new_encoder(config, seed=0)
    assert not trace_cache.is_patched()
    assert trace_cache.key(encoder, config) is None


PATCHES = {
    "a function": (softmax, "attention_weights"),
    "a method": (softmax.MultiHeadSelfAttention, "forward"),
    "an inherited method": (Encoder, "__call__"),
    "a constant": (simplify, "IR_VERSION"),
    "a function of the tracer": (simplify, "fold"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_nothing_is_cached_while_something_is_patched(name: str, trace_cache: TraceCache) -> None:
    encoder = new_encoder(config := small_config(), seed=0)
    assert trace_cache.key(encoder, config) is not None
    owner, attribute = PATCHES[name]
    with mock.patch.object(owner, attribute, mock.Mock()):
        assert trace_cache.key(encoder, config) is None
    with mock.patch.dict(ATTENTION_KINDS, {"softmax": ToyAttentionConfig}):
        assert trace_cache.key(encoder, config) is None
    assert trace_cache.key(encoder, config) is not None
