"""What a family's Hugging Face `config.json` says, read and written by tables."""
