"""Attention mechanisms, one module each. `parts` holds the components that they share."""
