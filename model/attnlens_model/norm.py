"""The two norms that encoders use.

Letters in shapes: B batch, T tokens, D width; any axes may stand before the last.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from attnlens_model.config_part import ConfigPart, is_positive


@dataclass(frozen=True, kw_only=True)
class NormConfig(ConfigPart, path="norm"):
    """The norms of an encoder.

    Attributes:
        kind: "layer" (LayerNorm) or "rms" (RMSNorm, which has a weight alone).
        eps: added to the variance (or mean square) in every norm.
        bias: whether a LayerNorm has a bias; of no effect for "rms".
        placement: "post": a norm after each residual sum. "pre": a norm before attention and feed-forward,
            and one after the last layer; attention of the first layer has none where the embeddings were just
            normalised. "both": the same, and a norm after attention and after feed-forward, before each
            residual sum. "post_twice": as "post", but attention's residual is added and
            normalised twice: norm(x + norm(x + attention(x))).
        first_layer: whether attention of the first layer has one even there; of no effect for "post".
    """

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-12
    bias: bool = True
    placement: Literal["post", "pre", "both", "post_twice"] = "post"
    first_layer: bool = False

    def _check(self) -> None:
        self.require("eps", is_positive(self.eps), "must be greater than 0, for example 1e-12")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Written out: ONNX has an operator for it only from opset 23 on.
    """

    def __init__(self, width: int, eps: float, *, weight: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if weight else None
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        is_half = hidden_states.dtype in (torch.float16, torch.bfloat16)
        # 256 squared is more than float16 can hold.
        exact = hidden_states.float() if is_half else hidden_states
        # The sum, not the mean: ONNX's ReduceMean takes its axis in one way up to opset 17, in another after.
        mean_square = (exact * exact).sum(dim=-1, keepdim=True) * (1.0 / exact.shape[-1])  # (B, T, 1)
        normalised = exact / torch.sqrt(mean_square + self.eps)
        normalised = normalised.to(hidden_states.dtype)
        return normalised if self.weight is None else normalised * self.weight


def make_norm(config: NormConfig, width: int) -> nn.Module:
    """Return a fresh norm of the kind that the configuration names, over vectors of `width`."""
    if config.kind == "rms":
        return RMSNorm(width, config.eps)
    return nn.LayerNorm(width, eps=config.eps, bias=config.bias)
