"""Exceptions for server errors, with a scripted server and from gRPC errors."""

import pickle
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.error_pb2 import ErrorReason
from attnlens_client import (
    AttnlensError,
    Client,
    DeadlineExceededError,
    FieldViolation,
    InputTooLongError,
    InvalidRequestError,
    ModelNotFoundError,
    NotSupportedError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitedError,
    RequestTooExpensiveError,
    RequestTooLargeError,
    ResponseTooLargeError,
    ServerError,
    SlowConsumerError,
    UnauthenticatedError,
    UnavailableError,
    errors,
)
from scripted import ScriptedServer, fails, refuse, vectors, violation

Call = Callable[..., Any]
Status = grpc.StatusCode
TOO_LONG = "has 300 tokens, but the limit is 256: shorten it, or set truncate"

KINDS: dict[str, tuple[grpc.StatusCode, type[AttnlensError]]] = {
    "INVALID_FIELD": (Status.INVALID_ARGUMENT, InvalidRequestError),
    "INPUT_TOO_LONG": (Status.INVALID_ARGUMENT, InputTooLongError),
    "RESPONSE_TOO_LARGE": (Status.INVALID_ARGUMENT, ResponseTooLargeError),
    "REQUEST_TOO_LARGE": (Status.INVALID_ARGUMENT, RequestTooLargeError),
    "REQUEST_TOO_EXPENSIVE": (Status.INVALID_ARGUMENT, RequestTooExpensiveError),
    "NOT_SUPPORTED": (Status.FAILED_PRECONDITION, NotSupportedError),
    "MALFORMED_REQUEST": (Status.INVALID_ARGUMENT, InvalidRequestError),
    "MODEL_NOT_FOUND": (Status.NOT_FOUND, ModelNotFoundError),
    "OVERLOADED": (Status.RESOURCE_EXHAUSTED, OverloadedError),
    "NOT_READY": (Status.UNAVAILABLE, UnavailableError),
    "SHUTTING_DOWN": (Status.UNAVAILABLE, UnavailableError),
    "DEADLINE_EXCEEDED": (Status.DEADLINE_EXCEEDED, DeadlineExceededError),
    "INTERNAL": (Status.INTERNAL, ServerError),
    "SLOW_CONSUMER": (Status.ABORTED, SlowConsumerError),
    "GRAPH_UNAVAILABLE": (Status.FAILED_PRECONDITION, ServerError),
    "UNAUTHENTICATED": (Status.UNAUTHENTICATED, UnauthenticatedError),
    "PERMISSION_DENIED": (Status.PERMISSION_DENIED, PermissionDeniedError),
    "RATE_LIMITED": (Status.RESOURCE_EXHAUSTED, RateLimitedError),
}


def test_every_protocol_reason_has_an_exception() -> None:
    reasons = {name.removeprefix("ERROR_REASON_") for name, number in ErrorReason.items() if number}
    assert reasons == set(KINDS) == set(errors._BY_REASON)


@pytest.mark.parametrize("reason", KINDS)
def test_reason_is_raised_as_its_exception(server: ScriptedServer, reason: str) -> None:
    code, kind = KINDS[reason]
    server.embed = fails(code, reason, "so it is", size_bytes="7")
    with (
        Client(server.address, max_attempts=1) as client,
        pytest.raises(AttnlensError, match=r"^so it is$") as caught,
    ):
        client.embed(["a"])
    error = caught.value
    assert type(error) is kind
    assert (error.reason, error.code, error.metadata) == (reason, code, {"size_bytes": "7"})
    assert (error.violations, error.text_index, error.retry_delay_s) == ((), None, None)
    assert isinstance(error.__cause__, grpc.RpcError)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Status.INVALID_ARGUMENT, InvalidRequestError),
        (Status.PERMISSION_DENIED, PermissionDeniedError),
        (Status.RESOURCE_EXHAUSTED, OverloadedError),
        (Status.ABORTED, AttnlensError),
    ],
)
@pytest.mark.parametrize("reason", ["", "REASON_OF_THE_FUTURE"])
def test_unknown_reason_falls_back_to_the_status(
    server: ScriptedServer, code: grpc.StatusCode, kind: type[AttnlensError], reason: str
) -> None:
    server.embed = fails(code, reason, "so it is")
    with Client(server.address, max_attempts=1) as client, pytest.raises(AttnlensError) as caught:
        client.embed(["a"])
    assert (type(caught.value), caught.value.reason) == (kind, reason)


def test_violation_has_the_callers_text_index(server: ScriptedServer, connect: Call) -> None:
    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        for index, text in enumerate(request.inputs):
            if text.text == "bad":
                told = violation(f"inputs[{index}]", TOO_LONG, index)
                numbers = {"num_tokens": "300", "max_tokens": "256"}
                refuse(context, Status.INVALID_ARGUMENT, "INPUT_TOO_LONG", "bad", told, **numbers)
        return vectors(request)

    server.embed = embed
    with connect(server.address, batch_size=5) as call, pytest.raises(InputTooLongError) as caught:
        call("embed", [*["a"] * 6, "bad", "a"])
    error = caught.value
    assert str(error) == f"texts[6] {TOO_LONG}"
    assert error.violations == (FieldViolation("texts[6]", TOO_LONG, 6),)
    assert (error.text_index, error.num_tokens, error.max_tokens) == (6, 300, 256)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (violation("inputs[0].text", "is bad", 0), "texts[0] is bad"),
        (violation("inputs[0].text_pair", "is bad", 0), "texts[0] is bad"),
        (violation("inputs[0].token_ids.input_ids[7]", "is -1", 0), "texts[0].token_ids.input_ids[7] is -1"),
        (violation("inputs", "is empty"), "texts is empty"),
        (violation("prompt.name", "is 'x'"), "prompt_name is 'x'"),
        (violation("attention[0].layers[2]", "is 9"), "attention[0].layers[2] is 9"),
        (violation("dimensions", "is inputs[41]"), "dimensions is inputs[41]"),
        (violation("field.of.the.future", "is new", 0), "texts[0]field.of.the.future is new"),
        (violation("inputs[0] \x1b[2J", "\u009b \u202e", 0), r"texts[0] \x1b[2J \x9b \u202e"),
    ],
)
def test_field_is_reported_under_its_argument_name(server: ScriptedServer, told: Any, expected: str) -> None:
    server.embed = fails(Status.INVALID_ARGUMENT, "INVALID_FIELD", "not this", told)
    with Client(server.address) as client, pytest.raises(InvalidRequestError) as caught:
        client.embed(["a"])
    assert str(caught.value) == expected


def test_all_violations_are_kept_and_the_first_ones_are_named(server: ScriptedServer) -> None:
    told = [violation(f"inputs[{index}].text", "is bad", index) for index in range(5)]
    server.embed = fails(Status.INVALID_ARGUMENT, "INVALID_FIELD", "not this", *told)
    with Client(server.address) as client, pytest.raises(InvalidRequestError) as caught:
        client.embed(["a"])
    assert [violation.text_index for violation in caught.value.violations] == list(range(5))
    assert str(caught.value) == "texts[0] is bad; texts[1] is bad; texts[2] is bad; and 2 more"


def test_text_index_is_never_parsed_from_the_message(server: ScriptedServer) -> None:
    message = "no model 'inputs[41]': there is 'scripted'"
    server.embed = fails(Status.NOT_FOUND, "MODEL_NOT_FOUND", message, available="scripted")
    with Client(server.address) as client, pytest.raises(ModelNotFoundError) as caught:
        client.embed(["a"])
    assert (caught.value.text_index, str(caught.value)) == (None, message)
    assert caught.value.available == "scripted"


def test_control_characters_in_a_message_are_escaped(server: ScriptedServer, connect: Call) -> None:
    server.embed = fails(Status.INVALID_ARGUMENT, "INVALID_FIELD", "bad \x1b[2J\u009b \u202e")
    with connect(server.address) as call, pytest.raises(InvalidRequestError) as caught:
        call("embed", ["a"])
    assert str(caught.value) == r"bad \x1b[2J\x9b \u202e"


@pytest.mark.parametrize("value", ["", "many", "-1", "9" * 5000])
def test_non_numeric_metadata_is_ignored(value: str) -> None:
    assert InputTooLongError("", metadata={"num_tokens": value}).num_tokens == 0


@pytest.mark.parametrize("trailer", [b"\xff\xff", "text"])
def test_undecodable_details_are_ignored(trailer: bytes | str) -> None:
    class Told(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return Status.INVALID_ARGUMENT

        def details(self) -> str:
            return "so it is"

        def trailing_metadata(self) -> Any:
            return (("attnlens-error-bin", trailer),)

    error = errors.from_rpc_error(Told())
    assert (type(error), str(error), error.reason) == (InvalidRequestError, "so it is", "")


def test_retry_follows_the_delay_from_the_server(server: ScriptedServer, connect: Call) -> None:
    server.embed = fails(
        Status.FAILED_PRECONDITION, "GRAPH_UNAVAILABLE", "soon", retry_delay_s=0.001, times=3
    )
    with connect(server.address) as call:
        assert call("embed", ["a"]).shape == (1, 4)
        server.embed = fails(Status.RESOURCE_EXHAUSTED, "RATE_LIMITED", "slowly", times=2)
        assert call("embed", ["a"]).shape == (1, 4)
        server.embed = fails(Status.FAILED_PRECONDITION, "GRAPH_UNAVAILABLE", "never")
        with pytest.raises(ServerError, match="never"):
            call("embed", ["a"])
        server.embed = fails(Status.RESOURCE_EXHAUSTED, "RATE_LIMITED", "tomorrow", retry_delay_s=86_400)
        with pytest.raises(RateLimitedError, match="tomorrow") as caught:
            call("embed", ["a"])
        assert caught.value.retry_delay_s == 86_400


def test_failures_can_be_pickled() -> None:
    error = InputTooLongError(
        "texts[6] is long",
        Status.INVALID_ARGUMENT,
        "INPUT_TOO_LONG",
        {"num_tokens": "302"},
        [FieldViolation("texts[6]", "is long", 6)],
        0.5,
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is InputTooLongError
    assert vars(copy) == vars(error)
    assert (str(copy), copy.num_tokens, copy.text_index) == ("texts[6] is long", 302, 6)
