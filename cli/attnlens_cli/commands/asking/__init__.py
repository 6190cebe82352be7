"""The commands that ask a server."""
