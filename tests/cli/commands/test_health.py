"""`attnlens health` with a real server and with scripted servers."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from scripted import ScriptedServer
from served import ServerProcess

RunHere = Callable[..., tuple[int, str, str]]

SERVICE = "attnlens.v1.EncoderService"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


@contextmanager
def answering(*replies: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server with these replies, the last one repeated, and its requests."""
    asked: list[bytes] = []

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
            def answer(request: bytes, _: grpc.ServicerContext) -> bytes:
                asked.append(request)
                return replies[min(len(asked), len(replies)) - 1]

            is_check = details.method == "/grpc.health.v1.Health/Check"
            return grpc.unary_unary_rpc_method_handler(answer) if is_check else None

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Handler(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address, asked
    server.stop(None).wait()


@pytest.mark.parametrize("options", [(), ("--attention",), ("--wait", "5")])
def test_real_server_is_serving(
    run_here: RunHere, minilm_server: ServerProcess, options: tuple[str, ...]
) -> None:
    address = minilm_server.address
    assert run_here("health", "--address", address, *options) == (0, f"{address} is serving\n", "")


def test_server_without_attention_weights_is_reported(
    run_here: RunHere, minilm_server: ServerProcess
) -> None:
    code, out, _ = run_here("health", "--attention", "--json", "--address", minilm_server.address)
    assert (code, json.loads(out)) == (
        0,
        {"address": minilm_server.address, "service": f"{SERVICE}.attentions", "status": "serving"},
    )


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (NOT_SERVING, "is not serving"),
        (b"", "reports an unknown status"),
        (b"\x08\x03", f"has no service {SERVICE}"),
    ],
)
def test_non_serving_status_has_exit_code_1_and_one_line(run_here: RunHere, reply: bytes, words: str) -> None:
    with answering(reply) as (address, asked):
        assert run_here("health", "--address", address) == (1, f"{address} {words}\n", "")
    assert asked == [b"\x0a" + bytes([len(SERVICE)]) + SERVICE.encode()]


@pytest.mark.parametrize("reply", [b"\xff", b"\x08\x09"])
def test_undecodable_response_is_reported_in_one_line(run_here: RunHere, reply: bytes) -> None:
    with answering(reply) as (address, _):
        code, out, err = run_here("health", "--address", address)
    assert (code, out, err.count("\n")) == (76, "", 1)
    assert "not a message of grpc.health.v1" in err


def test_wait_polls_until_the_server_is_serving(run_here: RunHere) -> None:
    with answering(NOT_SERVING, NOT_SERVING, SERVING) as (address, asked):
        assert run_here("health", "--address", address, "--wait", "60")[0] == 0
    assert len(asked) == 3


def test_wait_times_out(run_here: RunHere) -> None:
    with answering(NOT_SERVING) as (address, asked):
        assert run_here("health", "--address", address, "--wait", "0.3")[0] == 1
    assert len(asked) > 1
    code, _, err = run_here("health", "--address", "127.0.0.1:1", "--wait", "0.3")
    assert (code, err.startswith("attnlens health: no server answers at 127.0.0.1:1: start")) == (1, True)


def test_missing_server_is_reported_as_a_json_object(run_here: RunHere) -> None:
    code, out, err = run_here("health", "--address", "127.0.0.1:1", "--json")
    told = json.loads(out)
    assert (code, told["status"], err) == (1, "unreachable", "")
    assert told["message"].startswith("no server answers at 127.0.0.1:1: ")


def test_unresponsive_server_is_reported_after_the_timeout(run_here: RunHere) -> None:
    with socket.socket() as silent:  # accepts no connection
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        code, _, err = run_here("health", "--address", address, "--timeout-s", "0.2")
    assert (code, f"no server reachable at {address} for 0.2 s" in err) == (1, True)


def test_grpc_server_without_health_is_another_program(run_here: RunHere, server: ScriptedServer) -> None:
    code, _, err = run_here("health", "--address", server.address)
    assert (code, f"the program at {server.address} is not an attnlens server" in err) == (1, True)
