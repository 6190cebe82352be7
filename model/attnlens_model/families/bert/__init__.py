"""BERT and similar encoders with learned position embeddings."""
