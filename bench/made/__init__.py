"""Artifacts created once in `.bench/`: environments, bundles, checkpoints and converted models."""
