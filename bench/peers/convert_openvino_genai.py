"""Convert a bundle for openvino-genai, in fp32 and quantized by NNCF.

    python -m bench.peers.convert_openvino_genai BUNDLE DIRECTORY TEXTS MAX_TOKENS

Writes openvino_model.xml, openvino_tokenizer.xml and config.json to `DIRECTORY/fp32` and `DIRECTORY/int8`.
TEXTS is a JSON file with a list of calibration texts.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
from openvino_tokenizers import convert_tokenizer
from transformers import AutoTokenizer


def main() -> None:
    bundle, directory, texts_path, max_tokens = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    model = openvino.Core().read_model(Path(bundle) / "onnx" / "model.onnx")
    save(model, tokenizer, Path(bundle), Path(directory) / "fp32")
    texts = json.loads(Path(texts_path).read_text(encoding="utf-8"))
    inputs = [encode(tokenizer, text, int(max_tokens)) for text in texts]
    # ModelType.TRANSFORMER enables SmoothQuant and symmetric activations.
    quantized = nncf.quantize(
        model, nncf.Dataset(inputs), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(inputs)
    )
    save(quantized, tokenizer, Path(bundle), Path(directory) / "int8")


def encode(tokenizer: Any, text: str, max_tokens: int) -> dict[str, Any]:  # noqa: ANN401 - untyped in transformers
    """Return the graph inputs for one text, each of shape (1, T)."""
    encoded = tokenizer(text, truncation=True, max_length=max_tokens)
    ids = np.array([encoded["input_ids"]], dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def save(model: openvino.Model, tokenizer: object, bundle: Path, directory: Path) -> None:
    """Write a model without changing its precision, with its tokenizer and configuration."""
    directory.mkdir(parents=True)
    openvino.save_model(
        convert_tokenizer(tokenizer, with_detokenizer=False), directory / "openvino_tokenizer.xml"
    )
    openvino.save_model(model, directory / "openvino_model.xml", compress_to_fp16=False)
    shutil.copy(bundle / "config.json", directory)


if __name__ == "__main__":
    main()
