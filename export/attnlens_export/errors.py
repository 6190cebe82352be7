"""Exceptions of the exporter.

ExportError
├── SourceError   the tokenizer, pooling or configuration of a checkpoint is not supported
├── OutputError   the target directory can't be written or must not be replaced
├── GraphError    a graph is invalid or can't be converted
├── LintError     a graph is not portable; the message lists all findings
├── ParityError   a graph differs from the PyTorch encoder
├── DifferenceError the bundle differs from the publisher's pipeline
├── AccuracyError no graph in int8 passes the gate
└── EngineError   an engine can't open any graph, or does not support a precision
"""


class ExportError(Exception):
    """An export or a check failed. The message contains the cause and the remedy."""


class SourceError(ExportError):
    """The tokenizer, pooling or configuration of a checkpoint is not supported."""


class OutputError(ExportError):
    """The target directory can't be written or must not be replaced."""


class GraphError(ExportError):
    """A graph is invalid or can't be converted."""


class LintError(ExportError):
    """A graph is not portable.

    Attributes:
        findings: One line per deviation.
    """

    def __init__(self, path: str, findings: list[str]) -> None:
        self.findings = findings
        super().__init__(f"{path} is not a portable encoder graph: " + "; ".join(findings))


class AccuracyError(ExportError):
    """No graph in int8 passes the gate. The message contains the best measured accuracy."""


class EngineError(ExportError):
    """An engine can't open any graph of the bundle, or does not support a requested precision."""


class ParityError(ExportError):
    """A graph differs from the PyTorch encoder. The message contains the worst failure."""


class DifferenceError(ExportError):
    """The bundle differs from the publisher's pipeline. The message names the first result that differs."""
