"""Detection of saturating 8-bit matrix products in ONNX Runtime.

On x86 processors without VNNI, ONNX Runtime adds two products in 16 bits, which can saturate. The session
option `session.x64quantprecision` selects exact instructions, which take 1.6 times as long even on processors
with VNNI. It is therefore only set if the product saturates on this processor.
"""

import functools
from pathlib import Path

import numpy as np
import onnxruntime as ort

# MatMulInteger of the input (1, 64), uint8, and a constant (64, 16), int8, filled with 127.
_GRAPH = Path(__file__).with_name("saturation.onnx")
_EXACT = 64 * 255 * 127


@functools.cache
def int8_products_saturate() -> bool:
    """Compute the largest possible sum of products, and return whether it is too small."""
    session = ort.InferenceSession(_GRAPH, providers=["CPUExecutionProvider"])
    [product] = session.run(None, {"input": np.full((1, 64), 255, np.uint8)})
    return bool((product != _EXACT).any())
