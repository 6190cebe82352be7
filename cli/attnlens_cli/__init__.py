"""attnlens_cli."""
