"""Exact contributions of tokens to an embedding, as an ONNX graph of products without autograd.

For a given text, an encoder is linear in its token embeddings if attention weights, the standard deviations
in norms and the ratios of activations are held constant. A backward sweep through the graph therefore turns a
direction in embedding space into one score per token. The scores and the baseline (the share of the biases)
add up to the dot product of direction and embedding. See docs/explanations.md for the interpretation.
"""
