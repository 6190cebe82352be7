"""The commands that serve a bundle."""
