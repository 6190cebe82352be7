"""Encoders of long texts: not every token attends to every other."""
