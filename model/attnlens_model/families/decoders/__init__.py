"""Decoder language models with RoPE, causal or bidirectional."""
