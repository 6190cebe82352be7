"""From a checkpoint to a verified bundle: trace, simplify, write, compare, describe."""

from attnlens_export.bundle import BundleSummary, ExportOptions, export_bundle
from attnlens_export.errors import (
    AccuracyError,
    ExportError,
    GraphError,
    LintError,
    OutputError,
    ParityError,
    SourceError,
)

__all__ = [
    "AccuracyError",
    "BundleSummary",
    "ExportError",
    "ExportOptions",
    "GraphError",
    "LintError",
    "OutputError",
    "ParityError",
    "SourceError",
    "export_bundle",
]
