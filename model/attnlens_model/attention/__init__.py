"""Attention: one module for each mechanism, and what mechanisms share."""
