"""The two norms that encoders use.

Letters in shapes: B batch, T tokens, D width.
"""

import torch
from torch import Tensor, nn

from attnlens_model.config import EncoderConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).

    Written out: ONNX has an operator for it only from opset 23 on.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        is_half = hidden_states.dtype in (torch.float16, torch.bfloat16)
        # 256 squared is more than float16 can hold.
        exact = hidden_states.float() if is_half else hidden_states
        # The sum, not the mean: ONNX's ReduceMean takes its axis in one way up to opset 17, in another after.
        mean_square = (exact * exact).sum(dim=-1, keepdim=True) * (1.0 / exact.shape[-1])  # (B, T, 1)
        normalised = exact / torch.sqrt(mean_square + self.eps)
        return normalised.to(hidden_states.dtype) * self.weight


def make_norm(config: EncoderConfig, width: int) -> nn.Module:
    """Return a fresh norm of the kind that the configuration names, over vectors of `width`."""
    if config.norm == "rms":
        return RMSNorm(width, config.layer_norm_eps)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.norm_bias)
