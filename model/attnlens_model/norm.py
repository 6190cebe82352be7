"""Normalization layers: LayerNorm and RMSNorm.

Shape legend: B batch, T tokens, D hidden size. The leading axes are arbitrary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart, is_positive


@dataclass(frozen=True, kw_only=True)
class NormConfig(ConfigPart, path="norm"):
    """Norms of an encoder.

    Attributes:
        kind: "layer" (LayerNorm) or "rms" (RMSNorm, which has no bias).
        eps: Added to the variance (or mean square) in every norm.
        bias: Whether a LayerNorm has a bias. Ignored for "rms".
        placement: "post": a norm after each residual sum. "pre": a norm before attention and feed-forward,
            and one after the last layer. The first attention has no norm if the embeddings are normalized.
            "both": like "pre", with an additional norm after attention and feed-forward, before each residual
            sum. "post_twice": like "post", but the attention residual is added and normalized twice: norm(x +
            norm(x + attention(x))).
        first_layer: Whether the first attention has a norm even if the embeddings are normalized. Ignored for
            "post".
        final: Whether there is a norm after the last layer. If None, only with "pre" and "both".
    """

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-12
    bias: bool = True
    placement: Literal["post", "pre", "both", "post_twice"] = "post"
    first_layer: bool = False
    final: bool | None = None

    def _check(self) -> None:
        # Normalized so that equal encoders have equal configurations.
        if self.final == (self.placement in ("pre", "both")):
            object.__setattr__(self, "final", None)
        self.require("eps", is_positive(self.eps), "must be greater than 0, for example 1e-12")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Written out because ONNX has no such operator before opset 23.
    """

    def __init__(self, size: int, eps: float, *, weight: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size)) if weight else None
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        is_half = hidden_states.dtype in (torch.float16, torch.bfloat16)
        # float16 overflows at 256 squared.
        exact = hidden_states.float() if is_half else hidden_states
        # ReduceSum instead of ReduceMean, whose axes became an input in ONNX opset 18.
        mean_square = (exact * exact).sum(dim=-1, keepdim=True) * (1.0 / exact.shape[-1])  # (B, T, 1)
        normalized = exact / torch.sqrt(mean_square + self.eps)
        normalized = normalized.to(hidden_states.dtype)
        return normalized if self.weight is None else normalized * self.weight


def has_final_norm(config: NormConfig) -> bool:
    """Return whether there is a norm after the last layer."""
    return config.placement in ("pre", "both") if config.final is None else config.final


def make_norm(config: NormConfig, size: int) -> nn.Module:
    """Return a newly initialized norm of the configured kind over vectors of `size`."""
    if config.kind == "rms":
        return RMSNorm(size, config.eps)
    return nn.LayerNorm(size, eps=config.eps, bias=config.bias)
