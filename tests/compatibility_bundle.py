"""The bundle that a release has written: a small one for tests without PyTorch. It has no contributions."""

from pathlib import Path

RELEASED_BUNDLE = Path(__file__).parent / "compatibility" / "v0.1.0" / "bundle"
