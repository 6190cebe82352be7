"""The Python client of an attnlens server: numpy arrays in and out, over gRPC."""

from attnlens_client.async_client import AsyncClient
from attnlens_client.client import Client
from attnlens_client.errors import (
    AttnlensError,
    BadReplyError,
    DeadlineExceededError,
    InputTooLongError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ResponseTooLargeError,
    ServerError,
    SlowReaderError,
    UnavailableError,
)
from attnlens_client.results import (
    DenseLayer,
    Embeddings,
    EncodedText,
    HeadPart,
    LayerPart,
    Limits,
    ModelInfo,
    Parity,
    ParityFigure,
    Token,
    TokenizedText,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AttnlensError",
    "BadReplyError",
    "Client",
    "DeadlineExceededError",
    "DenseLayer",
    "Embeddings",
    "EncodedText",
    "HeadPart",
    "InputTooLongError",
    "InvalidRequestError",
    "LayerPart",
    "Limits",
    "ModelInfo",
    "ModelNotFoundError",
    "OverloadedError",
    "Parity",
    "ParityFigure",
    "ResponseTooLargeError",
    "ServerError",
    "SlowReaderError",
    "Token",
    "TokenizedText",
    "UnavailableError",
    "Usage",
]
