"""Explanations for the terminal and as JSON."""
