"""The commands that make, check and list bundles."""
