"""The commands that study a bundle's model by themselves, without a server."""
