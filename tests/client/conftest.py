"""Fixtures of the client tests."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attnlens_client import AsyncClient, Client
from references import Reference
from scripted import ScriptedServer
from served import ServerProcess

Array = npt.NDArray[np.float32]
Outputs = Callable[[str], tuple[Array, Array]]
Call = Callable[..., Any]


@pytest.fixture
def client(minilm_server: ServerProcess) -> Iterator[Client]:
    with Client(minilm_server.address) as client:
        yield client


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture(scope="session")
def passages() -> list[str]:
    """Return 500 passages of real prose, each between a sentence and a paragraph long."""
    path = Path(__file__).parent.parent / "data" / "passages.jsonl"
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def outputs(reference: Reference) -> Outputs:
    """Return a function that computes hidden states (T, D) and weights (L, H, T, T) of one text."""

    def run(text: str) -> tuple[Array, Array]:
        last_hidden_state, *weights = reference(text).values()
        return last_hidden_state, np.stack(weights)

    return run


@pytest.fixture(params=["Client", "AsyncClient"])
def connect(request: pytest.FixtureRequest) -> Call:
    """Return a function that opens a synchronous or asyncio client and calls its methods synchronously.

    Clients retry after the delay in the error, not later.
    """

    @contextmanager
    def connect_sync(address: str, **options: Any) -> Iterator[Call]:
        def call(method: str, *args: Any, **more: Any) -> Any:
            result = getattr(client, method)(*args, **more)
            return list(result) if isinstance(result, Generator) else result

        with Client(address, **options) as client:
            client._session.jitter = lambda: 0.0
            yield call

    async def all_of(stream: AsyncIterator[Any]) -> list[Any]:
        return [item async for item in stream]

    @contextmanager
    def connect_async(address: str, **options: Any) -> Iterator[Call]:
        async def connected() -> AsyncClient:
            return AsyncClient(address, **options)

        def call(method: str, *args: Any, **more: Any) -> Any:
            result = getattr(client, method)(*args, **more)
            if isinstance(result, AsyncIterator):
                return runner.run(all_of(result))
            return runner.run(result) if isinstance(result, Coroutine) else result

        with asyncio.Runner() as runner:
            client = runner.run(connected())
            client._session.jitter = lambda: 0.0
            yield call
            runner.run(client.close())

    return connect_sync if request.param == "Client" else connect_async
