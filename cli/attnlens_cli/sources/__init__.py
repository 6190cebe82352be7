"""The SOURCE argument: a bundle, or a checkpoint that is first exported into the cache."""
