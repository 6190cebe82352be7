"""Decoder language models, causal or bidirectional."""
