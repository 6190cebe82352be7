"""What a call can raise.

AttnlensError
├── InvalidRequestError          a field has a value that it can't have
│   ├── InputTooLongError        .num_tokens, .max_tokens
│   └── ResponseTooLargeError    .size_bytes, .max_message_bytes
├── ModelNotFoundError           .available
├── OverloadedError              still so after all retries
├── UnavailableError             no server, or one that starts or stops; after all retries
├── DeadlineExceededError
├── SlowReaderError              a stream was left unread for longer than the server waits
└── ServerError                  a fault of the server, .error_id stands in its log
    └── BadReplyError            it answered, but not with what was asked for

Arguments that are wrong whatever the server (a str in place of a list, an unknown pooling) raise
TypeError and ValueError before anything is sent.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

import grpc

_REASON_TRAILER = "attnlens-error-reason"
_METADATA_PREFIX = "attnlens-error-"
# gRPC itself refuses a message over the limit of either end, with these words and no reason of ours.
_LARGER_THAN_MAX = re.compile(r"(CLIENT|SERVER): \w+ message larger than max \((\d+) vs\. (\d+)\)")

_NUMBER = re.compile(r"[0-9]{1,19}")
# What gRPC says of bytes that are no message of the type.
_NO_MESSAGE = "Exception deserializing response!"

# How the server names a text of the request; the fields of a stream's request have `encode.` in front.
_TEXT_NUMBER = re.compile(r"\b(?:inputs|texts)\[(\d{1,9})\]")
_STREAM_PREFIX = re.compile(r"\bencode\.(?=[a-z_]+\b)")
# The messages in which the server does so. Others quote the request, which may have any words.
_REASONS_THAT_NAME_TEXTS = {"INVALID_FIELD", "INPUT_TOO_LONG", "RESPONSE_TOO_LARGE"}


class AttnlensError(Exception):
    """A call failed. The grpc.RpcError is the `__cause__`.

    Attributes:
        message: what is wrong and what to do about it.
        code: the gRPC status.
        reason: the name of an `attnlens.v1.ErrorReason` without its prefix, for instance
            `INPUT_TOO_LONG`. Empty where the failure did not come from an attnlens server.
        metadata: what the server says about the failure, for instance `{"num_tokens": "300"}`.
        text_index: the number of the text that is to blame, from 0, as in `texts[7]` of the message.
    """

    def __init__(
        self,
        message: str,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        text_index: int | None = None,
    ) -> None:
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.text_index = text_index
        super().__init__(
            message, code, reason, self.metadata, text_index
        )  # all of them, so that it can be pickled

    def __str__(self) -> str:
        return self.message

    def _number(self, key: str) -> int:
        value = self.metadata.get(key, "")
        return int(value) if _NUMBER.fullmatch(value) else 0


class InvalidRequestError(AttnlensError):
    """The request asks for something that can't be: sending it again will not help."""


class InputTooLongError(InvalidRequestError):
    """A text has more tokens than the model takes, and `truncate` is not set."""

    @property
    def num_tokens(self) -> int:
        """The tokens of the text, special tokens included."""
        return self._number("num_tokens")

    @property
    def max_tokens(self) -> int:
        """The most tokens that the model takes."""
        return self._number("max_tokens")


class ResponseTooLargeError(InvalidRequestError):
    """The result of one text is larger than a message may be: use `stream` or `stream_parts`."""

    @property
    def size_bytes(self) -> int:
        """The size that the message would have."""
        return self._number("size_bytes")

    @property
    def max_message_bytes(self) -> int:
        """The limit."""
        return self._number("max_message_bytes")


class ModelNotFoundError(AttnlensError):
    """The server does not hold the model."""

    @property
    def available(self) -> str:
        """The models that it holds, as the server lists them."""
        return self.metadata.get("available", "")


class OverloadedError(AttnlensError):
    """The server holds as many waiting texts as it may, and still did after the retries."""


class UnavailableError(AttnlensError):
    """No server answers at the address, or it is starting or stopping; the retries are used up."""


class DeadlineExceededError(AttnlensError):
    """The call took longer than `timeout_s`."""


class SlowReaderError(AttnlensError):
    """The parts of a stream were not fetched for longer than the server holds them."""


class ServerError(AttnlensError):
    """The server failed at a request that it should have answered."""

    @property
    def error_id(self) -> str:
        """What to look for in the server's log. Empty where the server gave none."""
        return self.metadata.get("error_id", "")


class BadReplyError(ServerError):
    """The call succeeded, but its reply is not what was asked for: rows, widths, names, numbers.

    Another program may answer at the address, something on the way may have changed the reply, or the
    model was replaced between two calls. Nothing of the reply was used.
    """


_BY_REASON: dict[str, type[AttnlensError]] = {
    "INVALID_FIELD": InvalidRequestError,
    "INPUT_TOO_LONG": InputTooLongError,
    "RESPONSE_TOO_LARGE": ResponseTooLargeError,
    "MODEL_NOT_FOUND": ModelNotFoundError,
    "OVERLOADED": OverloadedError,
    "NOT_READY": UnavailableError,
    "SHUTTING_DOWN": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "INTERNAL": ServerError,
    "MALFORMED_REQUEST": InvalidRequestError,
    "SLOW_READER": SlowReaderError,
    "GRAPH_UNAVAILABLE": ServerError,
}
# For failures without a reason: those of gRPC itself, of a proxy, of a server that is not ours.
_BY_CODE: dict[grpc.StatusCode, type[AttnlensError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNKNOWN: ServerError,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.DATA_LOSS: ServerError,
    grpc.StatusCode.UNIMPLEMENTED: ServerError,
}


def from_rpc_error(error: "grpc.RpcError | grpc.Future[Any]", first_index: int = 0) -> AttnlensError:
    """Return the exception for a failed call, by the server's reason, else by the status.

    `first_index` is the caller's number of the call's first text: the server counts from 0 in each call.
    """
    call = cast("grpc.Call", error)  # what gRPC raises for a call is a Call as well, in both APIs
    code, message = call.code(), printable(call.details() or "")
    if message == _NO_MESSAGE:
        return no_message_error()
    trailers = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
    reason = trailers.pop(_REASON_TRAILER, "")
    metadata = {
        key.removeprefix(_METADATA_PREFIX).replace("-", "_"): value
        for key, value in trailers.items()
        if key.startswith(_METADATA_PREFIX)
    }
    kind: type[AttnlensError]
    refused = _LARGER_THAN_MAX.search(message)
    if refused is not None:
        kind = ResponseTooLargeError if refused[1] == "CLIENT" else InvalidRequestError
        return kind(message, code, reason, {"size_bytes": refused[2], "max_message_bytes": refused[3]})
    text_index = None
    if reason in _REASONS_THAT_NAME_TEXTS:
        message = _STREAM_PREFIX.sub("", message)
        message = _TEXT_NUMBER.sub(lambda number: f"texts[{int(number[1]) + first_index}]", message)
        named = _TEXT_NUMBER.search(message)
        text_index = int(named[1]) if named else None
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, AttnlensError)
    return kind(message or code.name, code, reason, metadata, text_index)


def closed_error(cause: BaseException | None = None) -> AttnlensError:
    """Return what a call on a closed client raises."""
    error = AttnlensError("the client was closed", grpc.StatusCode.CANCELLED)
    error.__cause__ = cause
    return error


def no_message_error() -> BadReplyError:
    """Return the failure of a call whose reply has other bytes than a message of its type."""
    return BadReplyError("the reply is wrong: its bytes are no message of the reply's type")


def printable(text: str) -> str:
    r"""Return `text` with escapes such as `\x1b` for what a terminal would not show but obey."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
