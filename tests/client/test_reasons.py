"""How the failures of a server become exceptions: against a scripted server."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from attnlens_client import (
    AttnlensError,
    Client,
    DeadlineExceededError,
    InputTooLongError,
    InvalidRequestError,
    ModelNotFoundError,
    ServerError,
    SlowReaderError,
)
from scripted import ScriptedServer, fails

Call = Callable[..., Any]


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (grpc.StatusCode.ABORTED, "SLOW_READER", SlowReaderError),
        (grpc.StatusCode.FAILED_PRECONDITION, "GRAPH_UNAVAILABLE", ServerError),
        (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", InvalidRequestError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceededError),
    ],
)
def test_a_reason_has_its_exception(
    server: ScriptedServer, code: grpc.StatusCode, reason: str, kind: type[AttnlensError]
) -> None:
    server.embed = fails(code, reason, "so it is")
    with Client(server.address) as client, pytest.raises(kind, match="so it is") as caught:
        client.embed(["a"])
    assert (caught.value.reason, caught.value.code) == (reason, code)


def test_words_of_the_request_are_not_taken_for_the_number_of_a_text(server: ScriptedServer) -> None:
    message = "no model 'encode.inputs[41]': there is 'scripted'"
    server.embed = fails(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", message)
    with Client(server.address) as client, pytest.raises(ModelNotFoundError) as caught:
        client.embed(["a"])
    assert (caught.value.text_index, str(caught.value)) == (None, message)


def test_control_characters_of_a_message_are_escaped(server: ScriptedServer, connect: Call) -> None:
    server.embed = fails(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "inputs[0] \x1b[2J\u009b \u202e")
    with connect(server.address) as call, pytest.raises(InvalidRequestError) as caught:
        call("embed", ["a"])
    assert str(caught.value) == r"texts[0] \x1b[2J\x9b \u202e"


@pytest.mark.parametrize("number", ["12345678901", "9" * 5000])
def test_a_number_that_no_text_has_is_not_read(server: ScriptedServer, connect: Call, number: str) -> None:
    server.embed = fails(grpc.StatusCode.INVALID_ARGUMENT, "INPUT_TOO_LONG", f"inputs[{number}] is bad")
    with connect(server.address) as call, pytest.raises(InputTooLongError) as caught:
        call("embed", ["a"])
    assert caught.value.text_index is None
    assert InputTooLongError("", metadata={"num_tokens": number * 3}).num_tokens == 0
