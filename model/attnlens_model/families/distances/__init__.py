"""Encoders whose attention depends on the distance between tokens."""
