"""Encoders written with `nn.TransformerEncoder`, and their checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIZES = {"d_model": 32, "nhead": 4, "dim_feedforward": 48}
VOCAB_SIZE, NUM_POSITIONS, NUM_LAYERS = 50, 20, 2
CONFIG = {
    "model_type": "torch_encoder",
    **SIZES,
    "num_layers": NUM_LAYERS,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": NUM_POSITIONS,
}


class OwnEncoder(nn.Module):
    """What a user would write."""

    def __init__(self, options: dict[str, Any], extra: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, SIZES["d_model"])
        self.positions = nn.Embedding(NUM_POSITIONS, SIZES["d_model"])
        arguments: dict[str, Any] = {**SIZES, "batch_first": True, **options}
        layer = nn.TransformerEncoderLayer(**arguments)
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
