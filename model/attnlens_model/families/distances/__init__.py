"""Encoders that know positions by the distance of two tokens."""
