"""Results as terminal output, JSON or pictures."""
