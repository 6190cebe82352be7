"""BERT and what is built like it: a learned embedding for each position."""
