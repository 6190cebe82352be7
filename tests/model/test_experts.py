"""Mixture of experts: routing, patterns of feed-forward layers, and validation of configurations."""

from typing import Any

import pytest
import torch

from attnlens_model import ConfigError, EncoderConfig, new_encoder
from attnlens_model.experts import Experts, ExpertsConfig
from configs import changed, small_config

PART = {"intermediate_size": 20, "up_bias": False}
EXPERTS = PART | {"experts": {"num_experts": 4, "num_selected": 2}}


def parts(num_experts: int = 4, num_selected: int = 2) -> Experts:
    torch.manual_seed(3)
    config = ExpertsConfig(num_experts=num_experts, num_selected=num_selected)
    return Experts(config, 6, 10, torch.relu, bias=True)


@pytest.mark.parametrize("num_selected", [1, 2, 3, 4])
def test_token_goes_to_the_most_probable_experts_with_their_probabilities(num_selected: int) -> None:
    layer, x = parts(num_selected=num_selected), torch.randn(3, 50, 6) * 3
    gates = layer.gates(x)
    probabilities = torch.softmax(x @ layer.router.weight.T, dim=-1)
    values, numbers = probabilities.topk(num_selected)
    assert torch.equal(gates, torch.zeros_like(gates).scatter(-1, numbers, values))


def test_of_equally_probable_experts_the_first_are_taken() -> None:
    layer, x = parts(num_experts=5, num_selected=2), torch.ones(1, 1, 6)
    with torch.no_grad():
        layer.router.weight.zero_()
        assert torch.allclose(layer.gates(x), torch.tensor([0.2, 0.2, 0, 0, 0]))
        layer.router.weight[[1, 3, 4]] = 0.25
        assert (layer.gates(x)[0, 0] > 0).tolist() == [False, True, False, True, False]
        # Both are certain to be left out otherwise: their probabilities are 0.
        layer.router.weight[2] = 1000.0
        assert layer.gates(x)[0, 0].tolist() == [0, 0, 1, 0, 0]


def test_output_sums_the_experts_of_each_token_and_one_bias() -> None:
    layer, x = parts(), torch.randn(1, 7, 6)
    with torch.no_grad():
        layer.bias = torch.nn.Parameter(torch.randn(6))
        gates, output = layer.gates(x)[0], layer(x)[0]
        for token in range(7):
            expected = layer.bias.clone()
            for number in gates[token].nonzero().flatten().tolist():
                expert: Any = layer.experts[number]
                middle = torch.relu(expert.up.weight @ x[0, token])
                expected += gates[token, number] * (middle @ expert.down)
            assert torch.allclose(output[token], expected, atol=1e-6)


def test_pattern_of_feed_forward_parts_is_repeated_and_has_one_spelling() -> None:
    config = small_config({"num_layers": 5, "feed_forward": [PART, EXPERTS]})
    kinds = [part.experts is not None for part in config.layer_feed_forwards]
    assert kinds == [False, True, False, True, False]
    assert config == small_config({"num_layers": 5, "feed_forward": [PART, EXPERTS, PART, EXPERTS]})
    assert config.intermediate_size == 20
    assert EncoderConfig.from_json(config.to_json()) == config
    one = small_config({"feed_forward": [PART, PART]})
    assert one == small_config({"feed_forward": PART})
    encoder = new_encoder(config, seed=0)
    names = {name for name in encoder.state_dict() if "feed_forward" in name}
    assert "layers.3.feed_forward.experts.3.down" in names
    assert "layers.2.feed_forward.up.weight" in names
    assert not any(name.startswith("layers.3.feed_forward.up") for name in names)


def test_attnlens_family_and_nomics_can_state_a_pattern_and_bert_cannot() -> None:
    config = small_config({"family": "attnlens", "feed_forward": [PART, EXPERTS]})
    assert EncoderConfig.from_dict(config.to_hugging_face()) == config
    bert = changed(config, {"family": "bert"})
    assert EncoderConfig.from_dict(bert.to_hugging_face()) != bert


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"feed_forward": EXPERTS | {"kind": "gated"}},
            "kind='gated': must be 'plain' if there are experts",
        ),
        (
            {"feed_forward": EXPERTS | {"up_bias": True}},
            "up_bias=True: must be false if there are experts",
        ),
        (
            {"feed_forward": PART | {"experts": {"num_experts": 1, "num_selected": 1}}},
            "num_experts=1: must be at",
        ),
        (
            {"feed_forward": PART | {"experts": {"num_experts": 3, "num_selected": 4}}},
            "num_selected=4: must be fr",
        ),
        ({"feed_forward": [PART, PART, EXPERTS]}, "must not be longer than num_layers=2"),
        (
            {"feed_forward": [PART, EXPERTS], "num_hidden_groups": 1},
            "null if feed_forward differs between layer",
        ),
    ],
)
def test_invalid_experts_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(values)
