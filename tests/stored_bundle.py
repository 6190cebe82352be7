"""A small bundle for tests without PyTorch: fp32, fp16, prompts, a dense layer; no contributions graph."""

from pathlib import Path

STORED_BUNDLE = Path(__file__).parent / "data" / "bundle"
