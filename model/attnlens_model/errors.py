"""What this package raises when a configuration or a checkpoint cannot be used.

ModelError
├── ConfigError        a configuration that describes no encoder (also a ValueError)
└── CheckpointError    weights that are absent, unreadable or do not fit the configuration

Every message names the offending value, the limit and what to do about it.
"""

import difflib
from collections.abc import Iterable


class ModelError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ModelError, ValueError):
    """A configuration value is missing, unknown or out of range."""


class CheckpointError(ModelError):
    """A checkpoint cannot be found, read, or fitted to its configuration."""


# How alike two spellings must be for one to be a slip of the other, as difflib counts: "bret" and "bert" are
# 0.75 alike, "gpt2" and "gte" 0.57.
_ALIKE = 0.75


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'NAME'?)` where `name` is likely a slip of one of `known`, else nothing."""
    match = nearest(name, known)
    return f" (did you mean {match!r}?)" if match else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` of which `name` is likely a slip."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=_ALIKE)), None)
