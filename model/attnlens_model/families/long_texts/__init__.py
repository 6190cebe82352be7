"""Encoders for long texts with sparse attention."""
