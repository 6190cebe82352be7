"""Errors for addresses without an attnlens server, derived from gRPC errors."""

from typing import Any

import grpc
import pytest

from attnlens_client.core.calls import Session
from attnlens_client.errors import ConnectionProblem, connection_problem

AWAY, UNKNOWN_METHOD = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED


class Failure(grpc.RpcError):
    """A failed call, as reported by gRPC."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return str(self)

    def trailing_metadata(self) -> Any:
        return ()


@pytest.mark.parametrize(
    ("details", "answered", "uses_tls", "trouble"),
    [
        ("x; last error: UNKNOWN: Connection refused", False, False, ConnectionProblem.NO_SERVER),
        ("x; last error: Connection refused", False, True, ConnectionProblem.NO_SERVER),
        ("Socket closed", False, False, ConnectionProblem.NO_SERVER_OR_TLS),
        ("Socket closed", False, True, ConnectionProblem.NO_SERVER_OR_CERTIFICATE),
        ("Ssl handshake failed", False, True, ConnectionProblem.TLS_HANDSHAKE),
        ("Trying to connect an http1.x server", False, False, ConnectionProblem.OTHER_PROGRAM),
        ("Method not found!", True, False, ConnectionProblem.OTHER_PROGRAM),
    ],
)
def test_cause_is_derived_from_the_grpc_error(
    details: str, answered: bool, uses_tls: bool, trouble: ConnectionProblem
) -> None:
    found, cause = connection_problem(Failure(AWAY, details), answered=answered, uses_tls=uses_tls)
    assert (found, cause) == (trouble, details.rpartition("last error: ")[2])


def test_there_is_no_cause_without_a_grpc_error() -> None:
    assert connection_problem(None, answered=False, uses_tls=False) == (ConnectionProblem.NO_SERVER, "")


@pytest.mark.parametrize(
    ("code", "details", "uses_tls", "message"),
    [
        (
            AWAY,
            "a; last error: b",
            False,
            "no server answers at there:1: start one with `attnlens serve DIR`, or use another address (b)",
        ),
        (
            AWAY,
            "",
            False,
            "no server answers at there:1: start one with `attnlens serve DIR`, or use another address",
        ),
        (
            AWAY,
            "Socket closed",
            False,
            (
                "no server answers at there:1: start one with `attnlens serve DIR`, or use another address, "
                "or use credentials for TLS (Socket closed)"
            ),
        ),
        (
            AWAY,
            "SSL",
            True,
            (
                "the TLS handshake with there:1 failed: check the credentials, or omit them for a server "
                "without TLS (SSL)"
            ),
        ),
        (
            UNKNOWN_METHOD,
            "Method not found!",
            False,
            (
                "the program at there:1 is not an attnlens server: use another address, such as the gRPC "
                "port instead of the HTTP port, or credentials for TLS (Method not found!)"
            ),
        ),
    ],
)
def test_message_names_the_address_and_the_remedy(
    code: grpc.StatusCode, details: str, uses_tls: bool, message: str
) -> None:
    session = Session(
        address="there:1", timeout_s=1, batch_size=1, max_in_flight=1, max_attempts=1, uses_tls=uses_tls
    )
    error = Failure(code, details)
    failure = session.failure(error, 0)
    assert (failure.message, failure.code, failure.__cause__) == (message, code, error)
    session.has_answered = True  # an older server without some methods
    is_older = code is UNKNOWN_METHOD
    if details == "Socket closed":  # nothing about TLS, which has worked
        message = (
            "the connection to there:1 was lost: try again, or see the server's log if it has ended "
            "(Socket closed)"
        )
    assert session.failure(error, 0).message == (details if is_older else message)
