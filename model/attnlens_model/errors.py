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


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is spelled most like `name`; `known` must not be empty."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
