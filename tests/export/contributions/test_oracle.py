"""The graph of contributions against PyTorch's gradients with the same things frozen."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

import frozen_encoder
from attnlens.v1.manifest_pb2 import Activation
from attnlens_export.contributions.graph import contributions_graph
from attnlens_export.contributions.measure import make_feed, measure_case
from attnlens_export.contributions.reference import reference_contributions
from attnlens_export.contributions.tail import DenseWeights
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_model import Encoder, EncoderConfig, new_encoder
from configs import small_config
from mechanisms import LAYERS, mechanism_config

PRE = {"norm.placement": "pre", "norm.kind": "rms"}
CONFIGS: dict[str, EncoderConfig] = {name: mechanism_config(name) for name in LAYERS} | {
    "gated, rotary, grouped": small_config(
        PRE
        | {
            "attention": {
                "kind": "softmax",
                "num_heads": 4,
                "num_key_value_heads": 2,
                "rotary": {"theta": 10000.0},
                "head_norm": True,
            },
            "positions": {"scheme": "none", "max_position_embeddings": 40},
            "feed_forward": {"intermediate_size": 56, "kind": "gated", "activation": "silu"},
        }
    ),
    "values of another size, one layer without an output projection": small_config(
        {
            "family": "attnlens",
            "num_layers": 3,
            "attention": [
                {"kind": "softmax", "num_heads": 4, "value_head_size": 7},
                {
                    "kind": "softmax",
                    "num_heads": 4,
                    "num_key_value_heads": 2,
                    "head_size": 5,
                    "value_head_size": 12,
                    "output_projection": False,
                    "value_norm": True,
                },
                {"kind": "softmax", "num_heads": 3, "output_projection": False, "bias": False},
            ],
        }
    ),
    "shared layers without an output projection": small_config(
        {
            "family": "attnlens",
            "num_hidden_groups": 1,
            "attention": {"kind": "softmax", "num_heads": 4, "output_projection": False},
        }
    ),
    "two norms, ReLU, disentangled, convolution": small_config(
        {
            "norm.placement": "post_twice",
            "feed_forward.activation": "relu",
            "attention": {"kind": "disentangled", "num_heads": 4, "terms": "c2p|p2c"},
            "convolution": {"kernel_size": 3, "groups": 2, "activation": "gelu_tanh"},
        }
    ),
    "shared layers, experts": small_config(
        {
            "num_hidden_groups": 1,
            "feed_forward": {
                "intermediate_size": 56,
                "up_bias": False,
                "experts": {"num_experts": 3, "num_selected": 2},
            },
        }
    ),
    "norms on both sides, gated tanh, per-layer inputs, normalised values, projected": small_config(
        {
            "attention": {"kind": "softmax", "num_heads": 4, "num_key_value_heads": 2, "value_norm": True},
            "feed_forward": {"intermediate_size": 56, "kind": "gated", "activation": "gelu_tanh"},
            "output_size": 36,
            "norm.placement": "both",
            "norm.kind": "rms",
        }
    ),
}


def moved(encoder: Encoder) -> Encoder:
    """With biases and norms that are not those of the start, which would hide a mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for vector in (parameter for parameter in encoder.parameters() if parameter.ndim == 1):
            vector.add_(0.3 * torch.randn(vector.shape, generator=generator))
    return encoder


def open_session(graph: TracedGraph) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(graph.proto_with_weights().SerializeToString())


def run(session: onnxruntime.InferenceSession, feed: dict[str, Any]) -> dict[str, np.ndarray]:
    return dict(zip([out.name for out in session.get_outputs()], session.run(None, feed), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_gradients_times_embeddings_with_the_rest_frozen(name: str) -> None:
    config = CONFIGS[name]
    encoder = moved(new_encoder(config, seed=0))
    embeddings = embeddings_graph(trace(encoder, config))
    session, plain = open_session(contributions_graph(embeddings, config, ())), open_session(embeddings)
    for case in (Case(5, 33, Padding.RIGHT), Case(4, 7, Padding.LEFT)):
        inputs = make_inputs(case, config)
        feed = make_feed(inputs, config, config.vector_size)
        found, expected = run(session, feed), frozen_encoder.contributions(encoder, feed)
        scale = np.linalg.norm(feed["direction"], axis=1)
        assert np.abs(found["token_contributions"] - expected.tokens).max() < 2e-6 * scale.max()
        assert np.abs(found["head_contributions"] - expected.heads).max() < 2e-6 * scale.max()
        reference = reference_contributions(encoder, inputs, feed, ())
        assert reference is not None
        assert reference.fp32.heads is not None
        lengths = np.linalg.norm(found["embedding"], axis=1)
        tokens, heads = expected.tokens * lengths[:, None], expected.heads * lengths[:, None, None]
        limits = 2e-6 * scale.max() * lengths
        assert (np.abs(reference.fp32.tokens - tokens).max(axis=1) < limits).all()
        assert (np.abs(reference.fp32.heads - heads).max(axis=(1, 2)) < limits).all()
        hidden = run(plain, dict(inputs.feed()))["last_hidden_state"]
        measured = measure_case(lambda feed: run(session, feed), case, inputs, config, hidden)
        assert all(each.passed for each in measured)
        assert measured[0].name == "max incompleteness of token_contributions"
        assert measured[0].value < 2e-6


ACTIVATIONS: dict[Activation.ValueType, Callable[[Tensor], Tensor]] = {
    Activation.ACTIVATION_TANH: torch.tanh,
    Activation.ACTIVATION_RELU: torch.relu,
    Activation.ACTIVATION_GELU: torch.nn.functional.gelu,
    Activation.ACTIVATION_SILU: torch.nn.functional.silu,
    Activation.ACTIVATION_SIGMOID: torch.sigmoid,
    Activation.ACTIVATION_IDENTITY: lambda x: x,
}


class Layer:
    """A dense layer, as weights and as a function of PyTorch in float64."""

    def __init__(self, kind: Activation.ValueType, width: int) -> None:
        generator = np.random.default_rng(3)
        self.weight = (generator.standard_normal((20, width)) / 4).astype(np.float32)
        self.bias = generator.standard_normal(20).astype(np.float32)
        self.kind = kind

    def weights(self, *, normalize_input: bool) -> DenseWeights:
        return DenseWeights(self.weight, self.bias, self.kind, normalize_input)

    def apply(self, x: Tensor, *, normalize_input: bool) -> Tensor:
        """Hold the ratio of the activation to its input constant. Its value at 0 is separate."""
        if normalize_input:
            x = x / x.detach().norm(dim=1, keepdim=True)
        u = x @ torch.from_numpy(self.weight).double().T + torch.from_numpy(self.bias).double()
        function, fixed = ACTIVATIONS[self.kind], u.detach()
        start = function(torch.zeros((), dtype=torch.float64))
        return start + u * (function(fixed) - start) / fixed


@pytest.mark.parametrize("normalize_input", [False, True])
@pytest.mark.parametrize("kind", ACTIVATIONS, ids=Activation.Name)
def test_layers_behind_the_pooling(
    tiny_encoder: Encoder, tiny_trace: TracedGraph, kind: Activation.ValueType, *, normalize_input: bool
) -> None:
    config = tiny_encoder.config
    layer = Layer(kind, config.hidden_size)
    weights = layer.weights(normalize_input=normalize_input)
    session = open_session(contributions_graph(embeddings_graph(tiny_trace), config, [weights]))
    feed = make_feed(make_inputs(Case(5, 9, Padding.MIDDLE), config), config, 20)
    expected = frozen_encoder.contributions(
        tiny_encoder, feed, lambda x: layer.apply(x, normalize_input=normalize_input)
    )
    found = run(session, feed)
    assert np.allclose(found["token_contributions"], expected.tokens, atol=2e-5)
    total = found["token_contributions"].sum(axis=1) + found["baseline"]
    assert np.allclose(total, expected.total, atol=2e-5)


def test_dense_layer_after_pooling_has_its_exact_value() -> None:
    """The oracle itself: the frozen activation has the value of the activation."""
    x = torch.linspace(-3, 3, 48, dtype=torch.float64)[None]
    for kind, function in ACTIVATIONS.items():
        layer = Layer(kind, 48)
        u = x @ torch.from_numpy(layer.weight).double().T + torch.from_numpy(layer.bias).double()
        assert torch.allclose(layer.apply(x, normalize_input=False), function(u))
