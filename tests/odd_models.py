"""Reference models of `transformers` with unusual sizes and random parameters, one per family.

Default values or square matrices would hide an incorrect mapping, so all sizes are unusual, no LayerNorm is
the identity and no bias is zero.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 160,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class OddModel:
    """A randomly initialized model.

    Attributes:
        name: Class name without `kind`.
        changes: Overrides of `SIZES`.
        num_tokens: Maximum input length for comparisons.
        kind: Class name suffix of the encoder without a head.
        std: Standard deviation of the weights. Without score scaling, or with gated products, rounding errors
            grow faster with the weights in both implementations.
        source: Module that contains the classes.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 40
    kind: str = "Model"
    std: float = 0.15
    source: ModuleType = transformers

    def __str__(self) -> str:
        changes = [f"{key}={value}" for key, value in self.changes.items()]
        return " ".join([self.name, *changes, f"tokens={self.num_tokens}"])

    def config(self) -> Any:
        return getattr(self.source, f"{self.name}Config")(**SIZES | self.changes)

    def make(self, kind: str | None = None, seed: int = 5) -> Any:
        """Return the model in eval mode. `kind` selects a class with a head, such as "ForMaskedLM"."""
        config = self.config()
        config._attn_implementation = "eager"  # the only implementation that returns attention weights
        model: Any = getattr(self.source, self.name + (kind or self.kind))(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # Tensors without gradients are computed tables.
            for name, parameter in ((n, p) for n, p in model.named_parameters() if p.requires_grad):
                noise = torch.randn(parameter.shape, generator=generator)
                if re.search(r"(norm[^.]*|\bln(_\w+)?)\.(weight|gamma)$", name.lower()):
                    # Initialized to 0 if the norm multiplies by 1 + weight: the sum must be exact in fp32.
                    parameter.copy_(1 + 0.3 * noise if parameter.any() else (77 * noise).round() / 256)
                else:
                    parameter.copy_(self.std * noise)
            for name, buffer in model.named_buffers():
                # 1 in a new model; published checkpoints have other values.
                if name.endswith("layer_scalar"):
                    buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
        return model.eval()


@contextmanager
def float64_throughout(model: Any) -> Iterator[None]:
    """Make `transformers` compute in float64 even where it casts to float32: rotations, norms and softmax.

    `.double()` alone would keep these casts and the rotation frequencies rounded to fp32.
    """
    model.double()
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch, "FloatTensor", torch.DoubleTensor),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        if hasattr(model, "rotary_emb"):
            model.rotary_emb = type(model.rotary_emb)(config=model.config)
        for module in model.modules():
            # RoFormer's table of angles.
            if hasattr(module, "create_weight"):
                module.weight.data = module.create_weight()
            if hasattr(module, "scalar_embed_scale"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        yield


def padded_masks(batch: int, tokens: int) -> Iterator[Tensor]:
    """Return masks without padding and with padding on the right, on the left and in the middle."""
    lengths = torch.linspace(1, tokens, batch).long()[:, None]
    right = (torch.arange(tokens)[None] < lengths).long()
    yield torch.ones(batch, tokens, dtype=torch.int64)
    yield right
    yield right.flip(-1)
    yield torch.cat([right[:, ::2], right.flip(-1)[:, 1::2]], dim=-1)


def random_inputs(config: Any, mask: Tensor) -> dict[str, Tensor]:
    """Draw random ids, with padding ids exactly where the mask is 0, since `transformers` reads the ids.

    The same mask and sizes give the same ids.
    """
    generator = torch.Generator().manual_seed(7)
    vocabulary = torch.arange(config.vocab_size)
    vocabulary = vocabulary[vocabulary != config.pad_token_id]
    ids = vocabulary[torch.randint(0, len(vocabulary), mask.shape, generator=generator)]
    inputs = {"input_ids": torch.where(mask == 1, ids, config.pad_token_id), "attention_mask": mask}
    types = getattr(config, "type_vocab_size", 0)
    return inputs | (
        {"token_type_ids": torch.randint(0, types, mask.shape, generator=generator)} if types > 1 else {}
    )
