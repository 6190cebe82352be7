"""What the measurements of a bundle may fail with; each message says what can be done."""


class AnalysisError(Exception):
    """The base class of those here."""


class NotTeachableError(AnalysisError):
    """The layer's attention is not a softmax over q.k that can be taken apart."""


class UnknownTokenError(AnalysisError):
    """The text has no such token, or several."""


class UnknownHeadError(AnalysisError):
    """The model has no such layer or head."""


class TextError(AnalysisError):
    """The text can't be used: it is too long, or the bundle has no tokenizer."""


class LengthError(AnalysisError):
    """No length can be measured."""
