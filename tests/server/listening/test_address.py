"""Addresses are parsed and formatted as gRPC clients do."""

import os
import sys
from pathlib import Path

import pytest

from attnlens_client.addresses import checked_address
from attnlens_server.listening import AbstractAddress, TcpAddress, UnixAddress, parse_address

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="abstract names are specific to Linux")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", TcpAddress("127.0.0.1", 50051)),
        ("encoder-1.internal:0", TcpAddress("encoder-1.internal", 0)),
        ("[::1]:50051", TcpAddress("::1", 50051)),
        ("unix:/run/attnlens.sock", UnixAddress(Path("/run/attnlens.sock"))),
        ("unix:///run/attnlens.sock", UnixAddress(Path("/run/attnlens.sock"))),
        ("unix:/run/my%20models/a%25.sock", UnixAddress(Path("/run/my models/a%.sock"))),
        ("unix:/run/my models/é.sock", UnixAddress(Path("/run/my models/é.sock"))),
        ("unix:/run/../tmp/a.sock", UnixAddress(Path("/tmp/a.sock"))),
        pytest.param("unix-abstract:attnlens", AbstractAddress(b"attnlens"), marks=LINUX),
    ],
)
def test_address_round_trips_in_client_notation(text: str, address: object) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address
    assert " " not in str(address)
    if not str(address).endswith(":0"):  # servers only: any free port
        checked_address(str(address))


def test_relative_path_is_resolved_against_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_address("unix:./a.sock") == parse_address("unix:a.sock") == UnixAddress(tmp_path / "a.sock")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("localhost", "use HOST:PORT with a port from 0 to 65535, unix:PATH or unix-abstract:NAME"),
        ("localhost:65536", "a port from 0 to 65535"),
        ("::1:50051", "use HOST:PORT"),
        ("http://localhost:80", "use HOST:PORT"),
        ("unix:", "use a path after unix:"),
        ("unix:/a%00b", "use a path after unix:"),
        ("unix://host/a.sock", "one or three slashes"),
        ("unix:/" + 107 * "l", "has a path of 108 bytes"),
        ("unix:/" + 60 * "é", "has a path of 121 bytes"),
        pytest.param("unix-abstract:", "without a name", marks=LINUX),
        pytest.param("unix-abstract:" + 108 * "l", "has a name of 108 bytes", marks=LINUX),
    ],
)
def test_invalid_address_is_rejected_with_the_valid_formats(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_address(text)


def test_path_may_contain_invalid_utf8(tmp_path: Path) -> None:
    address = UnixAddress(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.sock")))
    assert str(address).endswith("/%FF.sock")
    assert parse_address(str(address)) == address
