"""Comparison of a bundle with the publisher's own pipeline: sentence-transformers or transformers."""
