"""The file format of SentencePiece models, as far as the export reads it: `model`."""
