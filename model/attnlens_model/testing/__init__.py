"""Checks for attention layers written in plain PyTorch.

    from attnlens_model.testing import check_attention

    report = check_attention(MyAttention(64, 8), hidden_size=64, num_heads=8, causal=True)
    print(report)
    report.raise_if_failed()
"""

from attnlens_model.testing.checklist import Item, LayerReport, Status, check_attention
from attnlens_model.testing.layer import LayerCallError, MaskStyle

__all__ = ["Item", "LayerCallError", "LayerReport", "MaskStyle", "Status", "check_attention"]
