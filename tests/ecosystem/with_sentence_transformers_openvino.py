"""A bundle in sentence-transformers, on its OpenVINO backend."""

from typing import Any

from sentence_transformers import CrossEncoder, SentenceTransformer
from torch.nn import Identity


def embed(
    bundle: str, texts: list[str], precision: str | None = None, file_name: str = "onnx/model.onnx"
) -> Any:
    options: dict[str, Any] = {"file_name": file_name, "from_onnx": True, "export": False}
    if precision:
        options["ov_config"] = {"INFERENCE_PRECISION_HINT": precision}
    model = SentenceTransformer(bundle, device="cpu", backend="openvino", model_kwargs=options)
    return model.encode(texts, batch_size=8)  # (texts, hidden_size), pooled according to the bundle


def score(bundle: str, pairs: list[tuple[str, str]]) -> Any:
    options = {"file_name": "onnx/model.onnx", "from_onnx": True, "export": False}
    config = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
    model = CrossEncoder(bundle, device="cpu", backend="openvino", model_kwargs=options | config)
    return model.predict(pairs, activation_fn=Identity())
