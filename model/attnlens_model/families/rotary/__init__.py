"""Encoders that turn queries and keys by their positions."""
