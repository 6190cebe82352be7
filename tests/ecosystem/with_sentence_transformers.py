"""A bundle in sentence-transformers, on its ONNX backend."""

from typing import Any

from sentence_transformers import CrossEncoder, SentenceTransformer
from torch.nn import Identity


def embed(bundle: str, texts: list[str], file_name: str = "onnx/model.onnx") -> Any:
    model = SentenceTransformer(bundle, backend="onnx", model_kwargs={"file_name": file_name})
    return model.encode(texts, batch_size=8)  # (texts, hidden_size), pooled according to the bundle


def score(bundle: str, pairs: list[tuple[str, str]]) -> Any:
    model = CrossEncoder(bundle, backend="onnx", model_kwargs={"file_name": "onnx/model.onnx"})
    return model.predict(pairs, activation_fn=Identity())
