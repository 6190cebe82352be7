"""Bind errors explain the cause and the remedy."""

import errno
import os
import socket
import sys

import pytest

from attnlens_server.listening import AbstractAddress, TcpAddress, find_bind_problem
from attnlens_server.listening.bind_problems import bind_problem


def test_port_in_use_names_the_option_to_change_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = TcpAddress("127.0.0.1", taken.getsockname()[1])
        assert find_bind_problem(address) == (
            "another program listens there. Stop it, or choose another --port, or 0 for a free one"
        )


def test_non_local_address_is_reported_with_the_local_ones() -> None:
    assert "no interface of this machine has that address. Use" in find_bind_problem(
        TcpAddress("192.0.2.1", 0)
    )


def test_unresolvable_name_is_reported() -> None:
    assert "'no-such-host.invalid' is not an address of this machine" in find_bind_problem(
        TcpAddress("no-such-host.invalid", 1)
    )


@pytest.mark.parametrize(
    ("port", "message"), [(80, "ports below 1024 require a privilege"), (8080, "denied")]
)
def test_privileged_port_names_the_required_privilege(port: int, message: str) -> None:
    error = OSError(errno.EACCES, os.strerror(errno.EACCES).lower())
    assert message in bind_problem(error, TcpAddress("127.0.0.1", port), "http-port")


@pytest.mark.skipif(sys.platform != "linux", reason="abstract names are specific to Linux")
def test_abstract_name_in_use_is_reported() -> None:
    name = os.urandom(8)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(b"\0" + name)
        assert find_bind_problem(AbstractAddress(name)) == (
            "another program listens there. Stop it, or choose another name"
        )


def test_address_that_became_free_suggests_a_retry() -> None:
    assert find_bind_problem(TcpAddress("127.0.0.1", 0)).endswith("try again")
