"""What can go wrong with a request, and how it is told.

    RequestError
    |- InvalidFieldsError      INVALID_ARGUMENT     INVALID_FIELD
    |- InputTooLongError       INVALID_ARGUMENT     INPUT_TOO_LONG
    |- ResponseTooLargeError   INVALID_ARGUMENT     RESPONSE_TOO_LARGE
    |- RequestTooLargeError    INVALID_ARGUMENT     REQUEST_TOO_LARGE
    |- TooExpensiveError       INVALID_ARGUMENT     REQUEST_TOO_EXPENSIVE
    |- MalformedRequestError   INVALID_ARGUMENT     MALFORMED_REQUEST
    |- ModelNotFoundError      NOT_FOUND            MODEL_NOT_FOUND
    |- OverloadedError         RESOURCE_EXHAUSTED   OVERLOADED
    |- GraphUnavailableError   FAILED_PRECONDITION  GRAPH_UNAVAILABLE
    |- NotSupportedError       FAILED_PRECONDITION  NOT_SUPPORTED
    |- NotReadyError           UNAVAILABLE          NOT_READY
    |- ShuttingDownError       UNAVAILABLE          SHUTTING_DOWN
    |- DeadlineError           DEADLINE_EXCEEDED    DEADLINE_EXCEEDED
    |- SlowConsumerError       ABORTED              SLOW_CONSUMER
    `- InternalError           INTERNAL             INTERNAL

    StartupError               the process can't serve: printed, exit code 1
    `- UnusableGraphError      a graph that no other try will make usable

Each class knows its status, by the names that gRPC uses, and its reason. How a protocol tells them is the
protocol's matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# What no protocol tells more of: gRPC's trailers have little room.
MAX_VIOLATIONS = 20
MAX_MESSAGE_BYTES = 768


class StartupError(Exception):
    """The server can't start: the message says why and what to do."""


class UnusableGraphError(StartupError):
    """A graph was altered, or is not what its manifest says: to try again brings nothing."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of a request and what is wrong with it.

    Attributes:
        field: a path like `inputs[3].text`.
        description: a sentence that follows the path.
        input_index: the number of the input that the path leads into; None: it leads into none.
    """

    field: str
    description: str
    input_index: int | None = None


class RequestError(Exception):
    """A request that is refused or failed. Subclasses fix the status and the reason."""

    status = "UNKNOWN"
    reason = "ERROR_REASON_UNSPECIFIED"

    def __init__(
        self,
        message: str,
        *,
        metadata: dict[str, str] | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        self.message = shortened(message, MAX_MESSAGE_BYTES)
        super().__init__(self.message)
        self.metadata = metadata or {}
        self.violations = violations
        self.retry_after_s = retry_after_s


class InvalidFieldsError(RequestError):
    """One or more fields have values that they can't have."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, violations: list[FieldViolation]) -> None:
        told = tuple(violations[:MAX_VIOLATIONS])
        message = "; ".join(f"{violation.field} {violation.description}" for violation in told[:3])
        if len(violations) > 3:  # noqa: PLR2004 - the rest stands in the details
            message += f"; and {len(violations) - 3} more"
        super().__init__(message, violations=told)


class InputTooLongError(RequestError):
    """A text has more tokens than the model takes, and the request does not allow truncation."""

    status = "INVALID_ARGUMENT"
    reason = "INPUT_TOO_LONG"

    def __init__(
        self,
        field: str,
        num_tokens: int,
        max_tokens: int,
        *,
        has_prompt: bool = False,
        input_index: int | None = None,
    ) -> None:
        tokens = f"{num_tokens} tokens with the prompt" if has_prompt else f"{num_tokens} tokens"
        description = f"has {tokens}, the model takes {max_tokens}: shorten it, or set truncate"
        super().__init__(
            f"{field} {description}",
            metadata={"num_tokens": str(num_tokens), "max_tokens": str(max_tokens)},
            violations=(FieldViolation(field, description, input_index),),
        )


class ResponseTooLargeError(RequestError):
    """The reply would not fit into a message."""

    status = "INVALID_ARGUMENT"
    reason = "RESPONSE_TOO_LARGE"

    def __init__(self, what: str, size_bytes: int, max_response_bytes: int, remedy: str) -> None:
        super().__init__(
            f"{what} would be {size_bytes} bytes, a message may have {max_response_bytes}: {remedy}",
            metadata={"size_bytes": str(size_bytes), "max_response_bytes": str(max_response_bytes)},
        )


class RequestTooLargeError(RequestError):
    """A call needs more than all calls together may have: it can never be served."""

    status = "INVALID_ARGUMENT"
    reason = "REQUEST_TOO_LARGE"


class TooExpensiveError(RequestError):
    """The estimated compute cost of a request is over the limit."""

    status = "INVALID_ARGUMENT"
    reason = "REQUEST_TOO_EXPENSIVE"

    def __init__(self, costs: Mapping[str, int], max_computed_tokens: int, remedy: str) -> None:
        """Blame the field with the highest cost; `costs` has the computed tokens of at least one field."""
        total = sum(costs.values())
        field = max(costs, key=costs.__getitem__)
        needed = f"{total}" if len(costs) == 1 else f"{costs[field]} of {total}"
        description = (
            f"needs {needed} computed tokens, a request may need {max_computed_tokens}: send fewer or "
            f"shorter texts, {remedy}, or start the server with a larger --max-computed-tokens"
        )
        super().__init__(
            f"{field} {description}",
            metadata={"computed_tokens": str(total), "max_computed_tokens": str(max_computed_tokens)},
            violations=(FieldViolation(field, description),),
        )


class MalformedRequestError(RequestError):
    """The bytes of a request are not a message of its type."""

    status = "INVALID_ARGUMENT"
    reason = "MALFORMED_REQUEST"

    def __init__(self, size_bytes: int, message_type: str) -> None:
        super().__init__(
            f"the {size_bytes} bytes of the request are not a message of type {message_type}: send one, made "
            "from the server's .proto file and not compressed"
        )


class ModelNotFoundError(RequestError):
    """The requested model, or the requested version of the model, is not loaded.

    Args:
        model: Requested model name.
        available: Name of the loaded model.
        version: Requested version. If empty, any version.
        available_version: Version of the loaded model.
    """

    status = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"

    def __init__(self, model: str, available: str, version: str = "", available_version: str = "") -> None:
        shown = shortened(model, 83)
        metadata = {"model": shown, "available": available}
        message = f"no model {shown!r} here: ask for {available!r}, or leave the name empty"
        if model == available:
            shown_version = shortened(version, 83)
            metadata |= {"model_version": shown_version, "available_version": available_version}
            message = (
                f"model {shown!r} has no version {shown_version!r} here: request the loaded version, "
                f"{available_version!r}, or leave model_version empty"
            )
        super().__init__(message, metadata=metadata)


class OverloadedError(RequestError):
    """As many texts wait, as much memory is taken, or as many calls run as may."""

    status = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class GraphUnavailableError(RequestError):
    """A graph of the bundle can't be used: for good, or with `retry_after_s` until it is tried again."""

    status = "FAILED_PRECONDITION"
    reason = "GRAPH_UNAVAILABLE"


class NotSupportedError(RequestError):
    """The bundle lacks what a method needs, or the server was started without it."""

    status = "FAILED_PRECONDITION"
    reason = "NOT_SUPPORTED"


class NotReadyError(RequestError):
    """The server is still starting."""

    status = "UNAVAILABLE"
    reason = "NOT_READY"


class ShuttingDownError(RequestError):
    """The server takes no new requests."""

    status = "UNAVAILABLE"
    reason = "SHUTTING_DOWN"


class DeadlineError(RequestError):
    """The deadline passed while the request waited."""

    status = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class SlowConsumerError(RequestError):
    """The client does not read what it asked for."""

    status = "ABORTED"
    reason = "SLOW_CONSUMER"


class InternalError(RequestError):
    """A fault of ours. The client gets an id, the log gets the rest."""

    status = "INTERNAL"
    reason = "INTERNAL"


def shortened(text: str, max_bytes: int) -> str:
    """Cut a text that is longer than `max_bytes` of UTF-8; three dots show it."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."
