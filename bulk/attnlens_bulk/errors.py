"""Exceptions of bulk embedding.

BulkError
├── InputError    an input is missing, unreadable or invalid
│   └── RowError  a row has no valid text, and bad rows are not skipped
├── ServersUnavailableError  no server has answered for the patience of the run
├── ResumeError   an input, the model or an option differs from those of the run
└── OutputError   the output cannot be written
"""


class BulkError(Exception):
    """Base class."""


class InputError(BulkError):
    """An input is missing, unreadable or invalid."""


class RowError(InputError):
    """A row has no valid text."""


class ResumeError(BulkError):
    """An input, the model or an option differs from those of the run."""


class OutputError(BulkError):
    """The output cannot be written."""


class ServersUnavailableError(BulkError):
    """All calls have failed for longer than the patience of the run."""
