"""Building `tokenizer.json` from the files of an older checkpoint."""
