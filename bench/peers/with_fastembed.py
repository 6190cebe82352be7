"""Runs fastembed with a bundle as a custom model.

    python -m bench.peers.with_fastembed BUNDLE DIMENSIONS THREADS MAX_TOKENS

fastembed has no option for the maximum length, so truncation is set on the tokenizer.
"""

import sys
from typing import Any

from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

from bench.peers.timing import serve_texts


def main() -> None:
    bundle, dimensions, threads, max_tokens = sys.argv[1:]
    TextEmbedding.add_custom_model(
        model="bundle",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="bundle"),  # required, but unused with specific_model_path
        dim=int(dimensions),
        model_file="onnx/model.onnx",
    )
    model = TextEmbedding("bundle", specific_model_path=bundle, threads=int(threads))
    model.model.tokenizer.enable_truncation(max_length=int(max_tokens))

    def run(texts: list[str], _what: str, batch_size: int) -> list[Any]:
        return list(model.embed(texts, batch_size=batch_size))

    serve_texts(run, ["fastembed", "onnxruntime"])


if __name__ == "__main__":
    main()
