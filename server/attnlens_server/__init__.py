"""attnlens_server."""
