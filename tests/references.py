"""Reference for server results: a single text in plain ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import tokenizers

# From zero to hundreds of words, so that batches have mixed lengths.
TEXTS = [
    "The animal didn't cross the street because it was too tired.",
    "",
    "Zoë's café in 東京 😀",
    "word " * 200,
    "A short one.",
    "It was late, the lamps were lit along the river, and nobody had thought of supper. " * 3,
]

Reference = Callable[[str], dict[str, npt.NDArray[np.float32]]]


def open_reference(bundle: Path) -> Reference:
    """Return a function that runs a single text in tokenizers and ONNX Runtime: outputs by name."""
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    session = onnxruntime.InferenceSession(
        bundle / "onnx" / "model_attentions.onnx", providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_outputs()]

    def run(text: str) -> dict[str, npt.NDArray[np.float32]]:
        ids = np.array([tokenizer.encode(text).ids], dtype=np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        return {name: array[0] for name, array in zip(names, session.run(names, inputs), strict=True)}

    return run
