"""What the server's answers are compared with: a text alone, through plain ONNX Runtime."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

# From no word to hundreds, so that a batch of them is never of one length.
TEXTS = [
    "The animal didn't cross the street because it was too tired.",
    "",
    "Zoë's café in 東京 😀",
    "word " * 200,
    "A short one.",
    "It was late, the lamps were lit along the river, and nobody had thought of supper. " * 3,
]

Reference = Callable[[str], dict[str, npt.NDArray[np.float32]]]
