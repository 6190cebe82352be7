"""Published weights: where they lie, how files hold them, and where each tensor goes."""
