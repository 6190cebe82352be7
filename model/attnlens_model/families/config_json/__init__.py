"""Readers and writers of Hugging Face `config.json` files, driven by tables."""
