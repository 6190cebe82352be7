"""A bundle in optimum: manually pooled token vectors, and attention weights."""

from typing import Any

import torch
from optimum.onnxruntime import (
    ORTModelForCustomTasks,
    ORTModelForFeatureExtraction,
    ORTModelForSequenceClassification,
)
from transformers import AutoTokenizer


def embed(
    bundle: str, texts: list[str], pooling: str, normalize: bool, file_name: str = "model.onnx"
) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    model = ORTModelForFeatureExtraction.from_pretrained(bundle, file_name=file_name)
    vectors: list[Any] = []
    for start in range(0, len(texts), 8):
        batch = tokenizer(texts[start : start + 8], padding=True, truncation=True, return_tensors="pt")
        hidden = model(**batch).last_hidden_state  # (batch, tokens, hidden_size)
        mask = batch["attention_mask"][..., None]
        pooled = hidden[:, 0] if pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1)
        vectors.extend(torch.nn.functional.normalize(pooled) if normalize else pooled)
    return vectors


def attend(bundle: str, texts: list[str]) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    model = ORTModelForCustomTasks.from_pretrained(bundle, file_name="model_attentions.onnx")
    outputs = model(**tokenizer(texts, padding=True, truncation=True, return_tensors="pt"))
    # Each layer's: (texts, heads, tokens, tokens).
    return [outputs[f"attentions.{layer}"] for layer in range(model.config.num_hidden_layers)]


def score(bundle: str, pairs: list[tuple[str, str]]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    model = ORTModelForSequenceClassification.from_pretrained(bundle, file_name="model.onnx")
    queries, documents = zip(*pairs, strict=True)
    batch = tokenizer(queries, documents, padding=True, truncation=True, return_tensors="pt")
    return model(**batch).logits[:, 0]
