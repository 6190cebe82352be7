"""Bulk embedding: files of any size in, parts with embeddings out. The same call resumes a run."""

from attnlens_bulk.errors import (
    BulkError,
    InputError,
    OutputError,
    ResumeError,
    RowError,
    ServersUnavailableError,
)
from attnlens_bulk.run import Estimate, Progress, Report, RunOptions, embed_files, estimate

__all__ = [
    "BulkError",
    "Estimate",
    "InputError",
    "OutputError",
    "Progress",
    "Report",
    "ResumeError",
    "RowError",
    "RunOptions",
    "ServersUnavailableError",
    "embed_files",
    "estimate",
]
