"""attnlens_client."""
