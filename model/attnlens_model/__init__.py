"""attnlens_model."""
