"""Whether ONNX Runtime's fast product of 8-bit matrices is exact on this processor.

On x86 without VNNI it adds two products in 16 bits, and what does not fit is cut off. Its session option
`session.x64quantprecision` avoids that with other instructions. They take 1.6 times as long on a processor
that has VNNI, too: so this asks the processor.
"""

import functools
from pathlib import Path

import numpy as np
import onnxruntime as ort

# MatMulInteger of the input (1, 64), uint8, and a constant (64, 16), int8, that is 127 throughout.
_GRAPH = Path(__file__).with_name("saturation.onnx")
_EXACT = 64 * 255 * 127


@functools.cache
def int8_products_saturate() -> bool:
    """Compute the largest sum of products there is, and return whether it is too small."""
    session = ort.InferenceSession(_GRAPH, providers=["CPUExecutionProvider"])
    [product] = session.run(None, {"input": np.full((1, 64), 255, np.uint8)})
    return bool((product != _EXACT).any())
