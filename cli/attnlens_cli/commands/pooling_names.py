"""The poolings as the command line calls them: known without an import, so that `attnlens --help` is fast."""

POOLINGS = ("mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length")
