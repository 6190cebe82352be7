"""Exceptions raised by the analyses."""


class AnalysisError(Exception):
    """Base class of all analysis errors."""


class NotTeachableError(AnalysisError):
    """The layer's attention cannot be decomposed into softmax(q.k)."""


class UnknownTokenError(AnalysisError):
    """The text contains no such token, or several."""


class UnknownHeadError(AnalysisError):
    """The layer or head does not exist."""


class TextError(AnalysisError):
    """The text is too long, or the bundle has no tokenizer."""


class LengthError(AnalysisError):
    """The lengths are invalid or none can be measured."""
