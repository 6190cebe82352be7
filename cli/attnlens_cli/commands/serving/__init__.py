"""Commands that serve a bundle."""
