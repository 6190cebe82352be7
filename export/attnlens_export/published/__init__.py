"""Readers for checkpoint metadata: modules, pooling, prompts, tokenizer and limits."""
