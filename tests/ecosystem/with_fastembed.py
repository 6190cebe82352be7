"""A bundle in fastembed, as a custom model."""

from typing import Any

from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
from fastembed.rerank.cross_encoder import TextCrossEncoder


def embed(bundle: str, texts: list[str], name: str, pooling: str, normalize: bool, dim: int) -> list[Any]:
    TextEmbedding.add_custom_model(
        model=name,
        pooling=PoolingType(pooling.upper()),
        normalization=normalize,
        sources=ModelSource(hf=name),  # required, but specific_model_path prevents any download
        dim=dim,
        model_file="onnx/model.onnx",
    )
    model = TextEmbedding(name, specific_model_path=bundle)
    return list(model.embed(texts, batch_size=8))


def score(bundle: str, pairs: list[tuple[str, str]]) -> list[float]:
    TextCrossEncoder.add_custom_model(
        model="reranker", sources=ModelSource(hf="reranker"), model_file="onnx/model.onnx"
    )
    return list(TextCrossEncoder("reranker", specific_model_path=bundle).rerank_pairs(pairs, batch_size=8))
