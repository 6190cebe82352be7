"""Checks of attention layers that users have written in PyTorch.

>>> from attnlens_model.testing import check_attention
>>> report = check_attention(torch.nn.MultiheadAttention(64, 4), hidden_size=64, num_heads=4)
>>> report.passed
True

`print(report)` lists every check, and `report.raise_if_failed()` serves as an assertion in tests.
"""

from attnlens_model.testing.checklist import Item, LayerReport, Status, check_attention
from attnlens_model.testing.layer import LayerCall, LayerCallError, MaskStyle

__all__ = ["Item", "LayerCall", "LayerCallError", "LayerReport", "MaskStyle", "Status", "check_attention"]
