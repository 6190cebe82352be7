"""Exceptions of this package.

ModelError
├── ConfigError        invalid configuration (also a ValueError)
└── CheckpointError    weights that are missing, unreadable or inconsistent with the configuration

Every message contains the invalid value, the limit and a remedy.
"""

import difflib
from collections.abc import Iterable


class ModelError(Exception):
    """Base class of all exceptions that this package raises."""


class ConfigError(ModelError, ValueError):
    """A configuration value is missing, unknown or out of range."""


class CheckpointError(ModelError):
    """A checkpoint is missing, unreadable or inconsistent with its configuration."""


# Minimum difflib ratio of a typo: 0.75 for "bret" and "bert", but 0.67 for "bge" and "gte".
_MIN_RATIO = 0.75


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'NAME'?)` if `name` is likely a typo of one of `known`, otherwise ""."""
    match = nearest(name, known)
    return f" (did you mean {match!r}?)" if match else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` of which `name` is likely a typo, or None."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=_MIN_RATIO)), None)
