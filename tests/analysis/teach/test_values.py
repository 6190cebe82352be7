"""Values located in attention graphs match the same encoder in PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnlens_analysis.errors import NotTeachableError
from attnlens_analysis.structure import read_proto, structure_of
from attnlens_analysis.teach.graph import check_mechanism, find_layer
from attnlens_analysis.teach.values import LayerValues, compute
from attnlens_export.graph.trace import TracedGraph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_model import Encoder, MultiHeadSelfAttention, attention_weights, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS
from attnlens_model.published_encoder import wrap_published
from configs import small_config
from mixed_mechanisms import random_encoder, traced_mixed
from odd_models import OddModel

IDS = np.arange(3, 16, dtype=np.int64)[None]


def traced(name: str) -> tuple[Encoder, TracedGraph]:
    """Return a BERT model, or a mixed-mechanism model with the given norm placement."""
    if name != "bert":
        return traced_mixed(name)
    encoder = random_encoder(small_config())
    return encoder, trace(encoder, small_config())


def computed(graph: TracedGraph, layers: int, path: Path) -> dict[int, LayerValues]:
    write_embedded(path, graph.proto, graph.weights)
    structure = structure_of(read_proto(path))
    names = {layer: find_layer(structure, layer, f"attentions.{layer}") for layer in range(layers)}
    return compute(path, names, "last_hidden_state", IDS)[0]


class Recorded:
    """Records the values of each softmax attention layer in PyTorch."""

    def __init__(self, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scores: list[dict[str, Any]] = []
        self.values: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.entering: list[torch.Tensor] = []
        weights_of, combine = attention_weights, MultiHeadSelfAttention.combine

        def record_weights(query: Any, key: Any, mask: Any, scale: float, bias: Any) -> Any:
            self.scores.append({"query": query, "key": key, "scale": scale, "bias": bias})
            return weights_of(query, key, mask, scale, bias)

        def record_values(module: Any, weights: Any, value: Any) -> Any:
            self.values.append(value)
            self.outputs.append(combine(module, weights, value))
            return self.outputs[-1]

        monkeypatch.setattr("attnlens_model.attention.softmax.attention_weights", record_weights)
        monkeypatch.setattr(MultiHeadSelfAttention, "combine", record_values)
        for layer in encoder.layers:
            layer.register_forward_pre_hook(lambda _, inputs: self.entering.append(inputs[0]))
        with torch.inference_mode():
            ids = torch.from_numpy(IDS)
            self.maps = encoder(ids, torch.ones_like(ids), output_attentions=True).attentions


@pytest.mark.parametrize(("name", "layers"), [("bert", 2), ("pre", 3), ("both", 1)])
def test_values_match_pytorch(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, graph = traced(name)
    layer_values = computed(graph, layers, tmp_path / "graph.onnx")
    recorded = Recorded(encoder, monkeypatch)
    assert len(layer_values) == layers
    for layer, values in layer_values.items():
        inner = recorded.scores[layer]
        expected = {
            "query": inner["query"],
            "key": inner["key"],
            "value": recorded.values[layer],
            "weights": recorded.maps[layer],
            "output": recorded.outputs[layer],
            "residual": recorded.entering[layer],
        }
        for field, tensor in expected.items():
            actual = getattr(values, field)
            np.testing.assert_allclose(actual, tensor[0], atol=2e-5, err_msg=f"{field} of {layer}")
        assert values.scale == pytest.approx(inner["scale"])
        bias = np.zeros(values.scores.shape) if inner["bias"] is None else inner["bias"][0].numpy()
        np.testing.assert_allclose(values.biases, np.where(values.allowed, bias, 0), atol=2e-5)
        np.testing.assert_allclose(values.weights_with(), values.weights, atol=2e-5)


def test_windows_rotary_embeddings_and_biases_are_detected(tmp_path: Path) -> None:
    first, second, third = computed(traced("pre")[1], 3, tmp_path / "graph.onnx").values()
    assert (first.is_rotated, second.is_rotated, third.is_rotated) == (True, False, False)
    assert (first.has_biases, second.has_biases, third.has_biases) == (False, True, True)
    positions = np.arange(IDS.shape[1])
    np.testing.assert_array_equal(third.allowed[0], np.abs(positions[:, None] - positions) <= 3)
    assert first.allowed.all()
    assert second.other_scale == pytest.approx(6**-0.5)  # the layer has no scale
    assert np.abs(first.key[0] - first.key[1]).max() == 0  # shared keys
    assert np.abs(first.key[1] - first.key[2]).max() > 0.01


def test_other_mechanisms_are_rejected_with_a_reason() -> None:
    kinds = set(ATTENTION_KINDS) - {"softmax"}
    assert kinds >= {"longformer", "big_bird", "composed", "disentangled", "mixture", "overlapping"}
    for kind in kinds:
        with pytest.raises(NotTeachableError, match=f"layer 1 is {kind}: its? .*attnlens attend"):
            check_mechanism(1, kind)
    with pytest.raises(NotTeachableError, match="is new_one: only softmax attention"):
        check_mechanism(1, "new_one")


def test_mismatching_graphs_are_rejected(tmp_path: Path) -> None:
    config = small_config(
        {"attention": {"kind": "disentangled", "num_heads": 4, "terms": "c2p"}, "num_layers": 1}
    )
    graph = trace(new_encoder(config, seed=0), config)
    write_embedded(tmp_path / "graph.onnx", graph.proto, graph.weights)
    structure = structure_of(read_proto(tmp_path / "graph.onnx"))
    with pytest.raises(NotTeachableError, match="layer 0 cannot be decomposed into softmax"):
        find_layer(structure, 0, "attentions.0")


@pytest.mark.parametrize(
    ("name", "attention", "feed_forward"),
    [
        ("Qwen3", "self_attn.o_proj", "mlp.down_proj"),
        ("Albert", "attention.dense", "ffn_output"),
    ],
)
def test_values_of_a_traced_module_match_its_submodules(
    name: str, attention: str, feed_forward: str, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    model = OddModel(name, sizes | ({"num_key_value_heads": 2} if name == "Qwen3" else {}), std=0.1).make()
    encoder = wrap_published(model, name.lower())
    found = computed(trace(encoder, encoder.config), 2, tmp_path / "graph.onnx")
    results: dict[str, list[torch.Tensor]] = {attention: [], feed_forward: []}
    for path, module in model.named_modules():
        for suffix, outputs in results.items():
            if path.endswith(suffix):
                module.register_forward_hook(lambda _module, _args, output, into=outputs: into.append(output))
    ids = torch.from_numpy(IDS)
    with torch.inference_mode():
        maps = model(ids, attention_mask=torch.ones_like(ids), output_attentions=True).attentions
    for layer, values in found.items():
        expected = {
            "weights": maps[layer],
            "output": results[attention][layer],
            "feed_forward": results[feed_forward][layer],
        }
        for field, tensor in expected.items():
            np.testing.assert_allclose(getattr(values, field), tensor[0], atol=2e-5, err_msg=field)
        np.testing.assert_allclose(values.weights_with(), values.weights, atol=2e-5)
        assert values.is_rotated == (name == "Qwen3")
