"""Embeddings in int8: what to quantize and how, chosen by measurement behind a gate of accuracy."""
