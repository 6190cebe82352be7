"""Runs sentence-transformers with one of its backends.

    python -m bench.peers.with_sentence_transformers DIRECTORY (torch|onnx|f32|bf16) THREADS MAX_TOKENS

`f32` and `bf16` select the OpenVINO backend in the given precision.
"""

import sys
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from bench.peers.timing import serve_texts


def open_model(directory: str, backend: str, threads: int) -> SentenceTransformer:
    if backend == "torch":
        return SentenceTransformer(directory, device="cpu")
    if backend == "onnx":
        import onnxruntime  # noqa: PLC0415 - optional dependency

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        kwargs = {
            "file_name": "onnx/model.onnx",
            "provider": "CPUExecutionProvider",
            "session_options": options,
        }
        return SentenceTransformer(directory, device="cpu", backend="onnx", model_kwargs=kwargs)
    config = {"INFERENCE_NUM_THREADS": str(threads), "INFERENCE_PRECISION_HINT": backend}
    return SentenceTransformer(
        directory, device="cpu", backend="openvino", model_kwargs={"ov_config": config}
    )


def main() -> None:
    directory, backend, threads, max_tokens = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = open_model(directory, backend, int(threads))
    model.max_seq_length = int(max_tokens)

    def run(texts: list[str], _what: str, batch_size: int) -> Any:  # noqa: ANN401 - an array
        return model.encode(texts, batch_size=batch_size, show_progress_bar=False)

    runtime = {"torch": "torch", "onnx": "onnxruntime"}.get(backend, "openvino")
    serve_texts(run, ["sentence-transformers", runtime])


if __name__ == "__main__":
    main()
