"""A bundle in sentence-transformers, on its OpenVINO backend."""

from typing import Any

from sentence_transformers import SentenceTransformer


def embed(
    bundle: str, texts: list[str], precision: str | None = None, file_name: str = "onnx/model.onnx"
) -> Any:
    options: dict[str, Any] = {"file_name": file_name, "from_onnx": True, "export": False}
    if precision:
        options["ov_config"] = {"INFERENCE_PRECISION_HINT": precision}
    model = SentenceTransformer(bundle, device="cpu", backend="openvino", model_kwargs=options)
    return model.encode(texts, batch_size=8)  # (texts, hidden_size), pooled according to the bundle
