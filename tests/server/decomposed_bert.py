"""Contributions of BERT's tokens to its logits by another method: vectors of tokens are carried forward.

The exported graph sweeps from a logit back to the tokens. Here, each hidden state is a sum of one vector per
token and one for all biases, which every layer maps to such a sum. Everything is computed in float64.

Shapes: S sources (T tokens and the biases), T tokens, D hidden size, H heads, C labels.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu


def contributions(model: Any, **inputs: Tensor) -> np.ndarray:
    """Return the contributions (S, C) of the tokens, then of the biases, of one text to the logits."""
    model = model.double().eval()
    with torch.no_grad():
        bert = model.bert
        parts = _embedded(bert.embeddings, inputs)
        for layer in bert.encoder.layer:
            parts = _layer(layer, parts, bert.config.num_attention_heads)
        pooled = _linear(bert.pooler.dense, parts[:, 0])  # (S, D)
        total = pooled.sum(0)
        return np.asarray(_linear(model.classifier, pooled * (torch.tanh(total) / total)))


def _embedded(embeddings: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the parts (S, T, D) of the first hidden state. A token's part is its own embedding."""
    ids, types = inputs["input_ids"][0], inputs["token_type_ids"][0]
    vectors = embeddings.word_embeddings(ids) + embeddings.token_type_embeddings(types)
    vectors = vectors + embeddings.position_embeddings(torch.arange(len(ids)))
    vectors = embeddings.LayerNorm(vectors)
    parts = torch.zeros(len(ids) + 1, *vectors.shape, dtype=torch.float64)
    parts[torch.arange(len(ids)), torch.arange(len(ids))] = vectors
    return parts


def _layer(layer: Any, parts: Tensor, num_heads: int) -> Tensor:
    own, hidden = layer.attention.self, parts.sum(0)

    def split(vectors: Tensor) -> Tensor:  # (..., T, D) -> (..., H, T, D / H)
        return vectors.reshape(*vectors.shape[:-1], num_heads, -1).transpose(-2, -3)

    query, key = split(own.query(hidden)), split(own.key(hidden))
    attention = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)  # (H, T, T)
    values = split(_linear(own.value, parts))
    context = (attention @ values).transpose(-2, -3).flatten(-2)
    parts = _norm(layer.attention.output.LayerNorm, parts + _linear(layer.attention.output.dense, context))
    inner = _linear(layer.intermediate.dense, parts)
    total = inner.sum(0)
    inner = inner * (gelu(total) / total)
    return _norm(layer.output.LayerNorm, parts + _linear(layer.output.dense, inner))


def _linear(linear: torch.nn.Linear, parts: Tensor) -> Tensor:
    """Apply the weight to each part, and add the bias to the last one."""
    result = parts @ linear.weight.T
    result[-1] += linear.bias
    return result


def _norm(norm: torch.nn.LayerNorm, parts: Tensor) -> Tensor:
    deviation = (parts.sum(0).var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    result = (parts - parts.mean(-1, keepdim=True)) / deviation * norm.weight
    result[-1] += norm.bias
    return result
