"""What mechanisms are made of: projections, masks, weights, rotation, biases."""
