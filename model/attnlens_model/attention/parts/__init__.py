"""Components of attention mechanisms: masks, weights, rotary embedding, position biases."""
