"""Reference implementation of NeoBERT from its paper (https://arxiv.org/abs/2502.19587).

transformers does not include NeoBERT, and the publisher's code was not available. The row order and the
rotation of adjacent pairs follow public reimplementations that load its weights. The code is independent of
the encoder: it rotates with complex numbers, splits one product into query, key and value, and masks with
infinity.

Shape legend: B batch, T tokens, D hidden size, H heads, K head size.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class NeoBert:
    """A random model with the configuration keys and tensor names of a published checkpoint."""

    content: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def draw(cls, seed: int = 5, **changes: float) -> "NeoBert":
        content: dict[str, Any] = {
            "model_type": "neobert",
            "vocab_size": 300,
            "hidden_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 170,
            "max_length": 64,
            "norm_eps": 1e-5,
            "pad_token_id": 0,
        }
        content |= changes
        width, middle = content["hidden_size"], -(-int(2 * content["intermediate_size"] / 3) // 8) * 8
        shapes = {"encoder.weight": (content["vocab_size"], width), "layer_norm.weight": (width,)}
        for layer in range(content["num_hidden_layers"]):
            root = f"transformer_encoder.{layer}."
            shapes |= {
                root + "qkv.weight": (3 * width, width),
                root + "wo.weight": (width, width),
                root + "ffn.w12.weight": (2 * middle, width),
                root + "ffn.w3.weight": (width, middle),
                root + "attention_norm.weight": (width,),
                root + "ffn_norm.weight": (width,),
            }
        generator = torch.Generator().manual_seed(seed)
        noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        tensors = {
            name: 1 + 0.3 * each if name.endswith("norm.weight") else 0.1 * each
            for name, each in noise.items()
        }
        return cls(content, tensors)

    def save(self, directory: Path, prefix: str = "") -> None:
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.content))
        save_file(
            {prefix + name: each for name, each in self.tensors.items()}, directory / "model.safetensors"
        )

    def run(self, ids: Tensor, mask: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Return the hidden states (B, T, D) and attention weights (B, H, T, T) of each layer."""
        tensors = {name: each.to(dtype) for name, each in self.tensors.items()}
        hidden, maps = tensors["encoder.weight"][ids], []
        for layer in range(self.content["num_hidden_layers"]):
            of_layer = {
                name.removeprefix(root).removesuffix(".weight"): each
                for root in (f"transformer_encoder.{layer}.",)
                for name, each in tensors.items()
                if name.startswith(root)
            }
            context, weights = self.attend(self.norm(hidden, of_layer["attention_norm"]), mask, of_layer)
            hidden = hidden + context @ of_layer["wo"].T
            gate, up = (self.norm(hidden, of_layer["ffn_norm"]) @ of_layer["ffn.w12"].T).chunk(2, dim=-1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ of_layer["ffn.w3"].T
            maps.append(weights)
        return [self.norm(hidden, tensors["layer_norm.weight"]), *maps]

    def norm(self, vectors: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(vectors, weight.shape, weight, self.content["norm_eps"])

    def attend(self, states: Tensor, mask: Tensor, of_layer: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        batch, tokens, width = states.shape
        heads = self.content["num_attention_heads"]
        split = (states @ of_layer["qkv"].T).view(batch, tokens, heads, 3 * width // heads)
        query, key, value = split.transpose(1, 2).chunk(3, dim=-1)  # (B, H, T, K) each
        scores = turned(query) @ turned(key).transpose(-2, -1) / (width // heads) ** 0.5
        weights = scores.masked_fill(mask[:, None, None, :] == 0, -torch.inf).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).reshape(batch, tokens, width), weights


def turned(vectors: Tensor) -> Tensor:
    """Rotate (B, H, T, K): adjacent pairs, as complex numbers, are multiplied by e^(i t 10000^(-2j/K))."""
    tokens, width = vectors.shape[-2:]
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), frequencies)
    pairs = torch.view_as_complex(torch.unflatten(vectors.double(), -1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(vectors)
