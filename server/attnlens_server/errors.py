"""Request errors with their gRPC status, HTTP status and reason, and startup errors.

RequestError
|- InvalidFieldsError      INVALID_ARGUMENT     400  INVALID_FIELD
|- InputTooLongError       INVALID_ARGUMENT     400  INPUT_TOO_LONG
|- ResponseTooLargeError   INVALID_ARGUMENT     400  RESPONSE_TOO_LARGE
|- RequestTooLargeError    INVALID_ARGUMENT     413  REQUEST_TOO_LARGE
|- TooExpensiveError       INVALID_ARGUMENT     400  REQUEST_TOO_EXPENSIVE
|- MalformedRequestError   INVALID_ARGUMENT     400  MALFORMED_REQUEST
|- UnauthenticatedError    UNAUTHENTICATED      401  UNAUTHENTICATED
|- PermissionDeniedError   PERMISSION_DENIED    403  PERMISSION_DENIED
|- ModelNotFoundError      NOT_FOUND            404  MODEL_NOT_FOUND
|- OverloadedError         RESOURCE_EXHAUSTED   429  OVERLOADED
|- RateLimitedError        RESOURCE_EXHAUSTED   429  RATE_LIMITED
|- GraphUnavailableError   FAILED_PRECONDITION  503  GRAPH_UNAVAILABLE (UNAVAILABLE if it is temporary)
|- NotSupportedError       FAILED_PRECONDITION  400  NOT_SUPPORTED
|- NotReadyError           UNAVAILABLE          503  NOT_READY
|- ShuttingDownError       UNAVAILABLE          503  SHUTTING_DOWN
|- DeadlineError           DEADLINE_EXCEEDED    504  DEADLINE_EXCEEDED
|- SlowConsumerError       ABORTED              -    SLOW_CONSUMER
|- InvalidResultError      INTERNAL             500  INTERNAL
`- InternalError           INTERNAL             500  INTERNAL

HTTP closes the connection of a slow consumer instead of sending a status.

StartupError               printed, exit code 1
`- UnusableGraphError      a graph is permanently unusable
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Limited by the size of gRPC trailers.
MAX_VIOLATIONS = 20
MAX_MESSAGE_BYTES = 768
MAX_FIELD_BYTES = 200


class StartupError(Exception):
    """The server cannot start. The message states the reason and the remedy."""


class UnusableGraphError(StartupError):
    """A graph was altered or does not match its manifest, so retrying will not help."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid field of a request.

    Attributes:
        field: Path of the field, such as `inputs[3].text`.
        description: Problem, limit and remedy, worded to follow the path.
        input_index: Index of the input, or None if the field is not part of one.
    """

    field: str
    description: str
    input_index: int | None = None

    def __post_init__(self) -> None:
        """Shorten both texts, which may contain values of the request."""
        object.__setattr__(self, "field", shortened(self.field, MAX_FIELD_BYTES))
        object.__setattr__(self, "description", shortened(self.description, MAX_MESSAGE_BYTES))


class RequestError(Exception):
    """Base class of request errors.

    Subclasses define `status`, a gRPC status name, `http_status` (default 400), and `reason`.
    """

    status = "UNKNOWN"
    http_status = 400
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
    """One or more fields are invalid."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, violations: list[FieldViolation]) -> None:
        included = tuple(violations[:MAX_VIOLATIONS])
        message = "; ".join(f"{violation.field} {violation.description}" for violation in included[:3])
        if len(violations) > 3:  # noqa: PLR2004 - the details contain the rest
            message += f"; and {len(violations) - 3} more"
        super().__init__(message, violations=included)


class InputTooLongError(RequestError):
    """A text has too many tokens for the model, and the request does not allow truncation.

    Attributes:
        remedy: How to fix it.
        can_truncate: Whether an option of the request would truncate the text.
    """

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
        remedy: str = "shorten it, or set truncate",
        can_truncate: bool = True,
    ) -> None:
        self.remedy = remedy
        self.can_truncate = can_truncate
        tokens = f"{num_tokens} tokens with the prompt" if has_prompt else f"{num_tokens} tokens"
        description = f"has {tokens}, but the limit is {max_tokens}: {remedy}"
        super().__init__(
            f"{field} {description}",
            metadata={"num_tokens": str(num_tokens), "max_tokens": str(max_tokens)},
            violations=(FieldViolation(field, description, input_index),),
        )


class ResponseTooLargeError(RequestError):
    """The response exceeds the maximum message size."""

    status = "INVALID_ARGUMENT"
    reason = "RESPONSE_TOO_LARGE"

    def __init__(self, name: str, size_bytes: int, max_response_bytes: int, remedy: str) -> None:
        super().__init__(
            f"{name} would be {size_bytes} bytes, but the limit is {max_response_bytes}: {remedy}",
            metadata={"size_bytes": str(size_bytes), "max_response_bytes": str(max_response_bytes)},
        )


class RequestTooLargeError(RequestError):
    """A call alone exceeds a limit shared by all calls, so it can never be served."""

    status = "INVALID_ARGUMENT"
    http_status = 413
    reason = "REQUEST_TOO_LARGE"


class TooExpensiveError(RequestError):
    """The estimated computational cost of a request exceeds the limit."""

    status = "INVALID_ARGUMENT"
    reason = "REQUEST_TOO_EXPENSIVE"

    def __init__(self, costs: Mapping[str, int], max_computed_tokens: int, remedy: str) -> None:
        """Name the field with the highest cost. `costs` maps fields to computed tokens."""
        total = sum(costs.values())
        field = max(costs, key=costs.__getitem__)
        needed = f"{total}" if len(costs) == 1 else f"{costs[field]} of {total}"
        description = (
            f"needs {needed} computed tokens, but the limit is {max_computed_tokens}: send fewer or shorter "
            f"texts, {remedy}, or start the server with a larger --max-computed-tokens"
        )
        super().__init__(
            f"{field} {description}",
            metadata={"computed_tokens": str(total), "max_computed_tokens": str(max_computed_tokens)},
            violations=(FieldViolation(field, description),),
        )


class MalformedRequestError(RequestError):
    """The request is not a valid message."""

    status = "INVALID_ARGUMENT"
    reason = "MALFORMED_REQUEST"

    def __init__(self, size_bytes: int, message_type: str) -> None:
        super().__init__(
            f"the request of {size_bytes} bytes is not a valid {message_type}: use the server's .proto "
            "files, and disable compression"
        )


class UnauthenticatedError(RequestError):
    """The credentials are missing or invalid."""

    status = "UNAUTHENTICATED"
    http_status = 401
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(RequestError):
    """The policy does not allow the client to call the method."""

    status = "PERMISSION_DENIED"
    http_status = 403
    reason = "PERMISSION_DENIED"


class ModelNotFoundError(RequestError):
    """The requested model, or the requested version of the model, is not loaded.

    Args:
        model: Requested model name.
        available: Name of the loaded model.
        version: Requested version. If empty, any version.
        available_version: Version of the loaded model.
    """

    status = "NOT_FOUND"
    http_status = 404
    reason = "MODEL_NOT_FOUND"

    def __init__(self, model: str, available: str, version: str = "", available_version: str = "") -> None:
        shown = shortened(model, 83)
        metadata = {"model": shown, "available": available}
        message = f"the model {shown!r} is not loaded: use {available!r}, or leave the name empty"
        if model == available:
            shown_version = shortened(version, 83)
            metadata |= {"model_version": shown_version, "available_version": available_version}
            message = (
                f"version {shown_version!r} of the model {shown!r} is not loaded: use {available_version!r}, "
                "or leave model_version empty"
            )
        super().__init__(message, metadata=metadata)


class OverloadedError(RequestError):
    """The limit on waiting texts, memory or calls has been reached."""

    status = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "OVERLOADED"


class RateLimitedError(RequestError):
    """The client has used up its rate."""

    status = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "RATE_LIMITED"


class GraphUnavailableError(RequestError):
    """A graph of the bundle is unusable. With `retry_after_s`, the server will try to open it again."""

    status = "FAILED_PRECONDITION"
    http_status = 503
    reason = "GRAPH_UNAVAILABLE"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        if retry_after_s is not None:
            self.status = "UNAVAILABLE"  # clients and proxies may retry it


class NotSupportedError(RequestError):
    """The bundle does not support the request, or the feature is disabled."""

    status = "FAILED_PRECONDITION"
    reason = "NOT_SUPPORTED"


class NotReadyError(RequestError):
    """The server is still starting."""

    status = "UNAVAILABLE"
    http_status = 503
    reason = "NOT_READY"


class ShuttingDownError(RequestError):
    """The server is shutting down."""

    status = "UNAVAILABLE"
    http_status = 503
    reason = "SHUTTING_DOWN"


class DeadlineError(RequestError):
    """The deadline passed while the request waited."""

    status = "DEADLINE_EXCEEDED"
    http_status = 504
    reason = "DEADLINE_EXCEEDED"


class SlowConsumerError(RequestError):
    """The client is not reading its response."""

    status = "ABORTED"
    reason = "SLOW_CONSUMER"


class InvalidResultError(RequestError):
    """The model has returned NaN or infinity for a text. `field` is the path of the text, if it is known."""

    status = "INTERNAL"
    http_status = 500
    reason = "INTERNAL"

    def __init__(self, field: str = "") -> None:
        description = (
            "has NaN or infinity in its result: remove it, or serve the model with another --precision. If "
            "all texts fail, export the bundle again"
        )
        match = re.fullmatch(r"inputs\[(\d+)\]", field)
        violation = FieldViolation(field, description, int(match[1]) if match else None)
        super().__init__(f"{field or 'a text'} {description}", violations=(violation,) if field else ())


class InternalError(RequestError):
    """Unexpected error. The client receives an ID, and the details are logged."""

    status = "INTERNAL"
    http_status = 500
    reason = "INTERNAL"

    def __init__(self, error_id: str) -> None:
        self.error_id = error_id
        super().__init__(
            f"internal server error: see error id {error_id} in the server's log",
            metadata={"error_id": error_id},
        )


def shortened(text: str, max_bytes: int) -> str:
    """Shorten a text to `max_bytes` of UTF-8, ending in "..."."""
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."
