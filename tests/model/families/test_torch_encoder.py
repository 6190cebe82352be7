"""`nn.TransformerEncoder` loaded as the family `torch_encoder`, compared with PyTorch."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnlens_model import CheckpointError, ConfigError, Encoder, ModuleEncoder, load_checkpoint
from attnlens_model.families.torch_encoder import sinusoidal_positions
from torch_encoders import NUM_POSITIONS, SIZES, VOCAB_SIZE, OwnEncoder, inputs, own_encoder, write

LAYOUTS = [
    pytest.param({}, {}, id="defaults"),
    pytest.param({"activation": "gelu", "norm_first": True}, {"final_norm": True}, id="pre-norm"),
    pytest.param({"norm_first": True}, {"final_norm": False}, id="pre-norm without a final norm"),
    pytest.param({"activation": "gelu"}, {"final_norm": True}, id="post-norm with a final norm"),
    pytest.param({"bias": False, "layer_norm_eps": 1e-3}, {}, id="no biases"),
    pytest.param({"batch_first": False}, {"scale_embeddings": True}, id="sequence first, scaled embeddings"),
]


def compare(encoder: Encoder | ModuleEncoder, own: OwnEncoder) -> float:
    """Return the largest difference of hidden states, weights and weights averaged over heads."""
    input_ids, mask = inputs()
    with torch.no_grad():
        states, weights = own(input_ids, mask)
        output = encoder(input_ids, mask, output_attentions=True)
    live = mask.bool()
    largest = (output.last_hidden_state - states)[live].abs().max()
    for ours, theirs in zip(output.attentions, weights, strict=True):
        rows = (ours - theirs).transpose(1, 2)[live]
        largest = max(largest, rows.abs().max(), rows.mean(dim=1).abs().max())
    return float(largest)


@pytest.mark.parametrize(("options", "extra"), LAYOUTS)
def test_hidden_states_and_weights_match_pytorch(
    tmp_path: Path, options: dict[str, Any], extra: dict[str, Any]
) -> None:
    own = own_encoder(options, extra)
    checkpoint = load_checkpoint(write(tmp_path, own.state_dict(), **options, **extra))
    assert compare(checkpoint.encoder, own) <= 1e-5
    assert set(checkpoint.unused_tensors) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(("options", "extra"), LAYOUTS)
def test_configuration_round_trip_is_exact(
    tmp_path: Path, options: dict[str, Any], extra: dict[str, Any]
) -> None:
    own = own_encoder(options, extra)
    config = load_checkpoint(write(tmp_path, own.state_dict(), **options, **extra)).config
    assert config.from_dict(config.to_hugging_face()) == config


@pytest.mark.parametrize("shape", [(1, 40, 32), (40, 1, 32), (40, 32)])
def test_stored_sinusoidal_table_is_used(tmp_path: Path, shape: tuple[int, ...]) -> None:
    own = own_encoder({}, {})
    table = sinusoidal_positions(40, SIZES["d_model"])
    own.positions.weight.data = table[:NUM_POSITIONS]
    tensors = {name: value for name, value in own.state_dict().items() if name != "positions.weight"}
    tensors["pos_encoder.pe"] = table.reshape(shape)
    directory = write(tmp_path, tensors, position_embedding="sinusoidal")
    assert compare(load_checkpoint(directory).encoder, own) <= 1e-5


def test_missing_sinusoidal_table_is_computed(tmp_path: Path) -> None:
    own = own_encoder({}, {})
    # The formula of the PyTorch tutorial.
    position = torch.arange(NUM_POSITIONS)[:, None]
    divisor = torch.exp(torch.arange(0, 32, 2) * (-math.log(10000.0) / 32))
    own.positions.weight.data[:, 0::2] = torch.sin(position * divisor)
    own.positions.weight.data[:, 1::2] = torch.cos(position * divisor)
    tensors = {name: value for name, value in own.state_dict().items() if name != "positions.weight"}
    directory = write(tmp_path, tensors, position_embedding="sinusoidal")
    assert compare(load_checkpoint(directory).encoder, own) <= 1e-5


def test_positions_may_be_absent(tmp_path: Path) -> None:
    own = own_encoder({}, {})
    own.positions.weight.data.zero_()
    tensors = {name: value for name, value in own.state_dict().items() if name != "positions.weight"}
    directory = write(tmp_path, tensors, position_embedding="none")
    assert compare(load_checkpoint(directory).encoder, own) <= 1e-5


def test_names_in_tensors_select_embeddings_and_encoder(tmp_path: Path) -> None:
    own = own_encoder({}, {})
    tensors = own.state_dict()
    tensors = {name.replace("encoder.", "stack.inner."): value for name, value in tensors.items()}
    tensors["teacher.layers.0.self_attn.in_proj_weight"] = torch.zeros(96, 32)
    tensors["w"], tensors["old_embedding"] = tensors.pop("embedding.weight"), torch.zeros(VOCAB_SIZE, 32)
    names = {"token": "w", "position": "positions.weight", "encoder": "stack.inner"}
    assert compare(load_checkpoint(write(tmp_path, tensors, tensors=names)).encoder, own) <= 1e-5


def test_embedding_norm_is_loaded(tmp_path: Path) -> None:
    own = own_encoder({}, {})
    norm = nn.LayerNorm(32)
    nn.init.normal_(norm.weight)
    tensors = own.state_dict() | {"norm.weight": norm.weight.detach(), "norm.bias": norm.bias.detach()}
    directory = write(tmp_path, tensors, embedding_norm=True, tensors={"embedding_norm": "norm"})
    input_ids, mask = inputs()
    with torch.no_grad():
        states = norm(own.embedding(input_ids) + own.positions.weight[:9])
        expected = own.encoder(states, src_key_padding_mask=mask == 0)
        actual = load_checkpoint(directory).encoder(input_ids, mask).last_hidden_state
    assert float((expected - actual)[mask.bool()].abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, "activation='tanh' is not supported"),
        ({"norm_first": "yes"}, "norm_first='yes' is not supported: it must be true or false"),
        (
            {"position_embedding": "rotary"},
            "position_embedding='rotary' is not supported: choose one of learned",
        ),
        ({"tensors": {"tokens": "w"}}, "tensors.tokens is not supported: use encoder, token, position"),
        ({"nhead": 5}, "attention.num_heads=5 does not divide hidden_size=32"),
    ],
)
def test_invalid_configuration_is_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    own = own_encoder({}, {})
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_checkpoint(write(tmp_path, own.state_dict(), **changes))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"encoder.layers.0.self_attn.in_proj_weight": None}, {}, "0 encoders have a tensor"),
        ({"other.layers.0.self_attn.in_proj_weight": torch.zeros(96, 32)}, {}, "2 encoders have a tensor"),
        ({"embedding.weight": None}, {"vocab_size": 49}, "set tensors.token to the name"),
        ({}, {"embedding_norm": True}, "no tensor embedding_norm.weight: set tensors.embedding_norm"),
        ({"copy_of_embedding": torch.zeros(50, 32)}, {}, "set tensors.token"),
        ({}, {"tensors": {"token": "nope"}}, "tensors.token is 'nope'"),
        ({"positions.weight": None}, {}, "position.weight: correct max_position_embeddings"),
        ({}, {"max_position_embeddings": 21}, "set tensors.position to the name of the table"),
        ({}, {"final_norm": True}, "final_norm.weight"),
        ({"encoder.norm.weight": torch.ones(32)}, {}, "unexpected"),
    ],
)  # fmt: skip
def test_inconsistent_weights_are_rejected(
    tmp_path: Path, tensors: dict[str, Tensor | None], config: dict[str, Any], message: str
) -> None:
    state = own_encoder({}, {}).state_dict() | tensors
    present = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(write(tmp_path, present, **config))
