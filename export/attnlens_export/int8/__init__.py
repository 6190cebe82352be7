"""Embeddings in int8: measurements select the matrix products to quantize and the methods to use."""
