"""SOURCE of a command: a bundle, or a checkpoint that is exported into a cache first."""
