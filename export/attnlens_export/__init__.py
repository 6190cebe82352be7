"""attnlens_export."""
