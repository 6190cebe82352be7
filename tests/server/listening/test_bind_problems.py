"""Why the system refuses an address, and what to do about it."""

import errno
import os
import socket
import sys

import pytest

from attnlens_server.listening import AbstractAddress, TcpAddress, find_bind_problem
from attnlens_server.listening.bind_problems import bind_problem


def test_a_port_in_use_is_told_with_the_option_that_chooses_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = TcpAddress("127.0.0.1", taken.getsockname()[1])
        assert find_bind_problem(address) == (
            "another program listens there. Stop it, or choose another --port, or 0 for a free one"
        )


def test_an_address_of_another_machine_is_told_with_those_of_this_one() -> None:
    assert "no interface of this machine has that address. Use" in find_bind_problem(
        TcpAddress("192.0.2.1", 0)
    )


def test_a_name_that_is_no_address_is_told() -> None:
    assert "'no-such-host.invalid' is not an address of this machine" in find_bind_problem(
        TcpAddress("no-such-host.invalid", 1)
    )


@pytest.mark.parametrize(("port", "message"), [(80, "ports below 1024 need a privilege"), (8080, "denied")])
def test_a_refused_port_is_told_with_the_privilege_that_it_needs(port: int, message: str) -> None:
    error = OSError(errno.EACCES, os.strerror(errno.EACCES).lower())
    assert message in bind_problem(error, TcpAddress("127.0.0.1", port), "viewer-port")


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux")
def test_an_abstract_name_in_use_is_told() -> None:
    name = os.urandom(8)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(b"\0" + name)
        assert find_bind_problem(AbstractAddress(name)) == (
            "another program listens there. Stop it, or choose another name"
        )


def test_an_address_that_is_free_by_now_is_told_to_be_tried_again() -> None:
    assert find_bind_problem(TcpAddress("127.0.0.1", 0)).endswith("try again")
