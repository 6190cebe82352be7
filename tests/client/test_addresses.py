"""Addresses of one or several servers."""

from typing import Any

import pytest

from attnlens_client import Client
from attnlens_client.addresses import checked_address, grpc_target, has_several
from attnlens_client.connection import grpc_options


@pytest.mark.parametrize("address", [["a:1", "b:2"], ("a:1", "b:2"), "a:1,b:2"])
def test_servers_are_a_list_or_separated_by_commas(address: Any) -> None:
    assert checked_address(address) == "a:1,b:2"
    with Client(address) as client:
        assert repr(client) == "Client('a:1,b:2')"


@pytest.mark.parametrize("address", [["a:1", 2], {"a:1"}, 50051, None, b"a:1"])
def test_address_of_another_type_is_rejected(address: Any) -> None:
    with pytest.raises(TypeError, match="use a str, HOST:PORT or unix:PATH, or a list of HOST:PORT"):
        checked_address(address)


def test_an_empty_list_is_rejected() -> None:
    with pytest.raises(ValueError, match="address is ''"):
        checked_address([])


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("a:1", "a:1"),
        ("dns:///a:1", "dns:///a:1"),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2"),
        ("127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2"),
        ("[::1]:1,127.0.0.2:2", "ipv6:[::1]:1,[::ffff:127.0.0.2]:2"),
        ("127.0.0.1:1,no-such-host.invalid:2", "ipv4:127.0.0.1:1"),
        ("no-such-host.invalid:1,no-such-host.invalid:2", "no-such-host.invalid:1"),
    ],
)
def test_list_becomes_a_target_of_ip_addresses(address: str, target: str) -> None:
    assert grpc_target(address) == target


def test_names_in_a_list_are_resolved() -> None:
    target = grpc_target("localhost:1,localhost:2")
    assert target in {
        "ipv4:127.0.0.1:1,127.0.0.1:2",
        "ipv6:[::1]:1,[::1]:2",
        "ipv6:[::1]:1,[::ffff:127.0.0.1]:1,[::1]:2,[::ffff:127.0.0.1]:2",
        "ipv6:[::ffff:127.0.0.1]:1,[::1]:1,[::ffff:127.0.0.1]:2,[::1]:2",
    }


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("unix:/a,b.sock", False),
        ("unix:/a.sock", False),
        ("ipv4:127.0.0.1:1", False),
        ("encoder.internal:1", True),
        ("dns:///encoder:1", True),
        ("127.0.0.1:1,127.0.0.1:2", True),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", True),
    ],
)
def test_calls_are_distributed_if_there_may_be_several_servers(address: str, expected: bool) -> None:
    assert has_several(address) is expected
    with Client(address) as client:
        assert ("round_robin" in dict(grpc_options(client))["grpc.service_config"]) is expected


def test_servers_of_a_list_receive_the_name_of_the_first() -> None:
    """gRPC would otherwise send the whole list as the authority, and compare certificates with it."""
    with Client("127.0.0.1:1,127.0.0.2:2") as several, Client("127.0.0.1:1") as one:
        assert dict(grpc_options(several))["grpc.default_authority"] == "127.0.0.1:1"
        assert "grpc.default_authority" not in dict(grpc_options(one))
