"""Export of checkpoints to verified bundles, and checks of bundles.

    export_bundle(source, output, ExportOptions(...))  -> BundleSummary
    export_module(module, output, vocab_size=..., max_tokens=...) -> BundleSummary
    check_bundle(directory, source)                    -> CheckSummary

`ExportOptions.precisions` accepts `Fp16()` and `Int8(Gate(...))`. All functions raise subclasses of
`ExportError`, see `attnlens_export.errors`. Names that are not in `__all__` may change in any version.
"""

from attnlens_export.bundle import BundleSummary, ExportOptions, export_bundle, export_module
from attnlens_export.check import CheckSummary, check_bundle
from attnlens_export.errors import (
    AccuracyError,
    DifferenceError,
    ExportError,
    GraphError,
    LintError,
    OutputError,
    ParityError,
    SourceError,
)
from attnlens_export.fp16 import Fp16
from attnlens_export.int8.precision import Int8
from attnlens_export.int8.result import Gate

__all__ = [
    "AccuracyError",
    "BundleSummary",
    "CheckSummary",
    "DifferenceError",
    "ExportError",
    "ExportOptions",
    "Fp16",
    "Gate",
    "GraphError",
    "Int8",
    "LintError",
    "OutputError",
    "ParityError",
    "SourceError",
    "check_bundle",
    "export_bundle",
    "export_module",
]
