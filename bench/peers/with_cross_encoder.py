"""Runs a reranker in sentence-transformers or fastembed.

    python -m bench.peers.with_cross_encoder DIRECTORY (torch|onnx|f32|bf16|fastembed) THREADS MAX_TOKENS

`f32` and `bf16` select sentence-transformers' OpenVINO backend in the given precision. Scores are logits.
"""

import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from bench.lines import Response, serve_lines

Score = Callable[[str, list[str], int], list[float]]


def open_fastembed(directory: str, threads: int) -> Score:
    from fastembed.common.model_description import ModelSource  # noqa: PLC0415 - optional dependency
    from fastembed.rerank.cross_encoder import TextCrossEncoder  # noqa: PLC0415

    TextCrossEncoder.add_custom_model(
        model="bundle",
        sources=ModelSource(hf="bundle"),  # required, but unused with specific_model_path
        model_file="onnx/model.onnx",
    )
    model = TextCrossEncoder("bundle", specific_model_path=directory, threads=threads)
    return lambda query, documents, size: list(model.rerank(query, documents, batch_size=size))


def open_sentence_transformers(directory: str, backend: str, threads: int, max_tokens: int) -> Score:
    import torch  # noqa: PLC0415 - optional dependency
    from sentence_transformers import CrossEncoder  # noqa: PLC0415

    torch.set_num_threads(threads)
    options: dict[str, Any] = {"device": "cpu", "max_length": max_tokens}
    if backend == "onnx":
        import onnxruntime  # noqa: PLC0415

        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = threads
        options |= {
            "backend": "onnx",
            "model_kwargs": {
                "file_name": "onnx/model.onnx",
                "provider": "CPUExecutionProvider",
                "session_options": session_options,
            },
        }
    elif backend != "torch":
        config = {"INFERENCE_NUM_THREADS": str(threads), "INFERENCE_PRECISION_HINT": backend}
        options |= {"backend": "openvino", "model_kwargs": {"ov_config": config}}
    model = CrossEncoder(directory, **options)

    def score(query: str, documents: list[str], size: int) -> list[float]:
        pairs = [(query, document) for document in documents]
        found = model.predict(
            pairs, batch_size=size, activation_fn=torch.nn.Identity(), show_progress_bar=False
        )
        return [float(logit) for logit in found]

    return score


def main() -> None:
    directory, backend, threads, max_tokens = sys.argv[1:]
    is_fastembed = backend == "fastembed"
    score = (
        open_fastembed(directory, int(threads))
        if is_fastembed
        else open_sentence_transformers(directory, backend, int(threads), int(max_tokens))
    )

    def handle(query: str, documents: list[str], batch_size: int) -> Response:
        started = time.perf_counter()
        logits = score(query, documents, batch_size)
        return {"seconds": time.perf_counter() - started, "logits": logits}

    package = "fastembed" if is_fastembed else "sentence-transformers"
    serve_lines(handle, versions={package: version(package)})


if __name__ == "__main__":
    main()
