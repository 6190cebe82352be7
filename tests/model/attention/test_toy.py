"""A custom mechanism: one module (tests/toy_attention.py) and one entry in the registry, added here."""

import pytest
import torch

from attnlens_model import ATTENTION_WEIGHTS, ConfigError, EncoderConfig, new_encoder
from attnlens_model.attention.kinds import ATTENTION_KINDS
from configs import changed, small_config
from toy_attention import TOY_GATES, ToyAttentionConfig

TOY: dict[str, object] = {"kind": "toy", "num_heads": 3, "sharpness": 2.0, "dropout": 0.0}
PATTERN = [TOY, {"kind": "softmax", "num_heads": 4, "dropout": 0.0}]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> EncoderConfig:
    """Return a configuration with three layers: toy, softmax, toy."""
    monkeypatch.setitem(ATTENTION_KINDS, "toy", ToyAttentionConfig)
    return small_config({"num_layers": 3, "hidden_dropout": 0.0, "attention": PATTERN})


def test_configuration_is_read_written_and_validated(config: EncoderConfig) -> None:
    assert EncoderConfig.from_json(config.to_json()) == config
    assert [attention.kind for attention in config.layer_attentions] == ["toy", "softmax", "toy"]
    assert [output.role for output in config.layer_outputs(2)] == [ATTENTION_WEIGHTS, TOY_GATES]
    assert [output.role for output in config.layer_outputs(1)] == [ATTENTION_WEIGHTS]
    with pytest.raises(ConfigError, match=r"unknown key 'attention\.sharpnes' .*mean 'attention\.sharpness'"):
        changed(config, {"attention": TOY | {"sharpnes": 1.0}})
    with pytest.raises(ConfigError, match=r"attention\.num_heads=5 does not divide hidden_size=48"):
        changed(config, {"attention": TOY | {"num_heads": 5}})


def test_unregistered_mechanism_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"attention\[0\]\.kind='toy' is not supported: choose one of soft"):
        small_config({"attention": PATTERN})


def test_layer_returns_the_outputs_of_its_configuration(config: EncoderConfig) -> None:
    encoder, ids = new_encoder(config, seed=0), torch.randint(0, 101, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with torch.no_grad():
        together = encoder(ids, mask, output_attentions=True)
        alone = encoder(ids[1:, :6], mask[1:, :6], output_attentions=True)
    for index, layer in enumerate(together.layers):
        assert list(layer) == [output.role for output in config.layer_outputs(index)]
        assert (layer[ATTENTION_WEIGHTS][1, :, :, 6:] == 0).all()
    gates, expected = together.layers[2][TOY_GATES], alone.layers[2][TOY_GATES]
    assert gates.shape == (2, 9, 3)
    assert (gates[1, :6] - expected[0]).abs().max() < 1e-6
    assert (together.last_hidden_state[1, :6] - alone.last_hidden_state[0]).abs().max() < 1e-5


def test_encoder_can_be_trained(config: EncoderConfig) -> None:
    encoder, ids = new_encoder(config, seed=0).train(), torch.randint(0, 101, (4, 9))
    target = torch.randn(4, 48)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        pooled: torch.Tensor = encoder(ids, torch.ones_like(ids)).last_hidden_state.mean(dim=1)
        return (pooled - target).square().mean()

    before = loss()
    before.backward()  # type: ignore[no-untyped-call]
    gradient = encoder.get_parameter("layers.0.attention.gate.weight").grad
    assert gradient is not None
    assert gradient.abs().max() > 0
    optimizer.step()
    assert loss() < before
