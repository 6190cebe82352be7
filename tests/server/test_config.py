"""Server options: an out-of-range value is rejected, and the error contains the range."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.listening import TcpAddress


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurrent_inputs": 0}, "max_concurrent_inputs is 0: use 1"),
        ({"max_batch_tokens": -5}, "max_batch_tokens is -5: use 0"),
        ({"max_text_bytes": 99_999_999}, "max_text_bytes is 99999999: use 1 to 4194304"),
        ({"start_timeout_s": 0}, "start_timeout_s is 0: use 0.001"),
        (
            {"address": "localhost"},
            "address is 'localhost': use HOST:PORT with a port from 0 to 65535, unix:",
        ),
        ({"address": ""}, "address is '': use HOST:PORT"),
        ({"address": "a:1", "port": 1}, "host or port is also set: use only one of them"),
        ({"threads": "2"}, "threads is '2': use an integer"),
        ({"threads": 2.5}, "threads is 2.5: use an integer"),
        ({"threads": True}, "threads is True: use an integer"),
        ({"threads": None}, "threads is None: use an integer"),
        ({"max_tokens": "9"}, "max_tokens is '9': use an integer or None"),
        ({"stall_timeout_s": "3"}, "stall_timeout_s is '3': use a number"),
        ({"explain": "no"}, "explain is 'no': use True or False"),
        ({"host": 1}, "host is 1: use a str"),
        ({"host": ""}, "host is '': use one address or name without a port"),
        ({"http_host": "127.0.0.1,::1"}, "http_host is '127.0.0.1,::1': use one address"),
        ({"metrics_host": "127.0.0.1:9090"}, "metrics_host is '127.0.0.1:9090': use one address"),
        ({"address": 50051}, "address is 50051: use a str or None"),
        ({"socket_mode": 660}, "socket_mode is 660: use a str"),
        ({"provider": 1}, "provider is 1: use one of auto, cpu, cuda"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s is nan: use 0"),
        ({"socket_mode": "999"}, "socket_mode is '999': use three octal digits, such as 660"),
    ],
)
def test_option_out_of_range_is_rejected_with_the_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(bundle=Path(), **options)
    assert message in str(caught.value)


def test_numpy_numbers_and_whole_seconds_are_accepted() -> None:
    config = ServerConfig(bundle=Path(), threads=np.int64(2), stall_timeout_s=3, max_tokens=None)  # type: ignore[arg-type]
    assert (config.threads, config.stall_timeout_s) == (2, 3)


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", "0.0.0.0", "::"])
def test_every_listener_takes_the_same_hosts(host: str) -> None:
    config = ServerConfig(
        bundle=Path(), host=host, http_host=host, metrics_host=host, port=1, http_port=1, metrics_port=1
    )
    assert config.listens_at == config.http_address == config.metrics_address
    assert config.listens_at == TcpAddress(host.strip("[]"), 1)
    assert ServerConfig(bundle=Path()).metrics_address is None
    assert {field.default for field in fields(ServerConfig) if field.name.endswith("host")} == {"127.0.0.1"}


def test_host_and_port_are_ignored_for_a_socket() -> None:
    config = ServerConfig(bundle=Path(), address="unix:/run/a.sock", host="0.0.0.0", port=1)
    assert str(config.listens_at) == "unix:/run/a.sock"
