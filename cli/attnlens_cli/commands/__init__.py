"""Subcommands. Slow imports are inside of the functions, so that `attnlens --help` is fast."""
