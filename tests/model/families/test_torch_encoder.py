"""`nn.TransformerEncoder` loaded as the family `torch_encoder`, compared with PyTorch."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnlens_model import CheckpointError, ConfigError, Encoder, load_checkpoint
from attnlens_model.families.torch_encoder import sinusoidal_positions

SIZES = {"d_model": 32, "nhead": 4, "dim_feedforward": 48}
VOCAB_SIZE, NUM_POSITIONS, NUM_LAYERS = 50, 20, 2
CONFIG = {
    "model_type": "torch_encoder",
    **SIZES,
    "num_layers": NUM_LAYERS,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": NUM_POSITIONS,
}
LAYOUTS = [
    pytest.param({}, {}, id="defaults"),
    pytest.param({"activation": "gelu", "norm_first": True}, {"final_norm": True}, id="pre-norm"),
    pytest.param({"norm_first": True}, {"final_norm": False}, id="pre-norm without a final norm"),
    pytest.param({"activation": "gelu"}, {"final_norm": True}, id="post-norm with a final norm"),
    pytest.param({"bias": False, "layer_norm_eps": 1e-3}, {}, id="no biases"),
    pytest.param({"batch_first": False}, {"scale_embeddings": True}, id="sequence first, scaled embeddings"),
]


class OwnEncoder(nn.Module):
    """What a user would write."""

    def __init__(self, options: dict[str, Any], extra: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, SIZES["d_model"])
        self.positions = nn.Embedding(NUM_POSITIONS, SIZES["d_model"])
        layer = nn.TransformerEncoderLayer(**SIZES, **{"batch_first": True, **options})
        norm = nn.LayerNorm(SIZES["d_model"]) if extra.get("final_norm") else None
        self.encoder = nn.TransformerEncoder(layer, NUM_LAYERS, norm, enable_nested_tensor=False)
        self.head = nn.Linear(SIZES["d_model"], VOCAB_SIZE)
        self.scale = math.sqrt(SIZES["d_model"]) if extra.get("scale_embeddings") else 1.0
        self.is_batch_first = options.get("batch_first", True)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states (B, T, D) and the weights of each layer (B, H, T, T)."""
        positions = self.positions(torch.arange(input_ids.shape[1]))
        states = self.embedding(input_ids) * self.scale + positions
        padding, weights = attention_mask == 0, []

        def record(module: nn.Module, arguments: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            options = {**options, "need_weights": True, "average_attn_weights": False}
            weights.append(type(module).forward(module, *arguments, **options)[1])

        hooks = [
            layer.self_attn.register_forward_pre_hook(record, with_kwargs=True)
            for layer in self.encoder.layers
        ]
        states = states if self.is_batch_first else states.transpose(0, 1)
        output = self.encoder(states, src_key_padding_mask=padding)
        for hook in hooks:
            hook.remove()
        return output if self.is_batch_first else output.transpose(0, 1), weights


def own_encoder(options: dict[str, Any], extra: dict[str, Any]) -> OwnEncoder:
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    return OwnEncoder(options, extra).eval()


def write(directory: Path, state: dict[str, Tensor], /, **config: object) -> Path:
    torch.save(state, directory / "pytorch_model.bin")
    content = {key: value for key, value in (CONFIG | config).items() if key != "batch_first"}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def inputs() -> tuple[Tensor, Tensor]:
    input_ids = torch.randint(VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(input_ids)
    mask[1, 5:], mask[2, 8:] = 0, 0
    return input_ids, mask


def compare(encoder: Encoder, own: OwnEncoder) -> float:
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
        ({"embedding.weight": None}, {"vocab_size": 49}, "no tensor has the shape (49, 32)"),
        ({"copy_of_embedding": torch.zeros(50, 32)}, {}, "set tensors.token"),
        ({}, {"tensors": {"token": "nope"}}, "tensors.token is 'nope'"),
        ({"positions.weight": None}, {}, "position.weight"),
        ({}, {"max_position_embeddings": 21}, "position.weight"),
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
