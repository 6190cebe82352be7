"""Encoders with rotary position embedding (RoPE)."""
