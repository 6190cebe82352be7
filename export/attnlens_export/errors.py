"""The errors of the exporter.

ExportError
├── SourceError   the checkpoint's own files (tokenizer, pooling, config) can't become a bundle
├── OutputError   the target directory can't be written or may not be replaced
├── GraphError    the traced graph can't be brought into the portable form
├── LintError     a graph is not what a bundle promises; the message lists every finding
├── ParityError   a graph does not compute what the PyTorch encoder computes
├── AccuracyError no graph in int8 passes the gate
└── EngineError   an engine can't be measured as it was asked for
"""


class ExportError(Exception):
    """An export or a check failed. The message names the value at fault and what to do."""


class SourceError(ExportError):
    """The checkpoint's tokenizer, pooling or configuration can't become a bundle."""


class OutputError(ExportError):
    """The target directory can't be written, or may not be replaced."""


class GraphError(ExportError):
    """A traced graph can't be brought into the portable form."""


class LintError(ExportError):
    """A graph is not what a bundle promises.

    Attributes:
        findings: one line for each deviation.
    """

    def __init__(self, path: str, findings: list[str]) -> None:
        self.findings = findings
        super().__init__(f"{path} is not a portable encoder graph: " + "; ".join(findings))


class AccuracyError(ExportError):
    """No graph in int8 passes the gate; the message tells the best that was found."""


class EngineError(ExportError):
    """An engine opens no graph of the bundle, or a precision was named that is not there."""


class ParityError(ExportError):
    """A graph does not compute what the PyTorch encoder computes; the message names the worst place."""
