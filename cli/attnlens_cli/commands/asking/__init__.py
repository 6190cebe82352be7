"""Commands that send requests to a server."""
