"""`explain` and `compare`: from arguments to requests, and from replies to results that were checked."""
