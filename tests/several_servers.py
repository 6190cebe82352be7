"""Several server processes, and load on them whose results are checked."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from attnlens_client import AsyncClient, Client, EncodedText
from served import ServerProcess

OPTIONS = ("--threads", "1", "--access-log", "all", "--drain-timeout-s", "10")
TEXTS = [f"Number {number} " + "is a text of some length. " * (number % 7) for number in range(48)]


def start(bundle: Path, *options: str) -> ServerProcess:
    return ServerProcess(bundle, *OPTIONS, *options).__enter__()


def restarted(bundle: Path, server: ServerProcess, *options: str) -> ServerProcess:
    """Stop a server as a rolling update does, and start another one at its address."""
    assert server.stop() == 0
    server.__exit__(None, None, None)
    return start(bundle, "--port", server.address.rpartition(":")[2], *options)


@contextmanager
def running(bundle: Path, *options: Sequence[str]) -> Iterator[list[ServerProcess]]:
    """Start a server for each sequence of options. The list may be changed; its servers are killed."""
    with ThreadPoolExecutor(len(options)) as threads:
        started = list(threads.map(lambda each: start(bundle, *each), options))
    yield started
    for server in started:
        server.process.kill()
        server.process.wait()
        server.__exit__(None, None, None)


class Load:
    """Calls of a blocking and an asyncio client, until the end of the block. Each result is checked."""

    def __init__(self, addresses: str | Sequence[str]) -> None:
        self.addresses = addresses
        with Client(addresses) as client:
            self.vectors = client.embed(TEXTS)
            self.tokens = [text.tokens for text in client.encode_stream(TEXTS)]
        self.counts = {"embed": 0, "embed_iter": 0, "encode_stream": 0}
        self.is_stopped = False
        self._threads = ThreadPoolExecutor(5)
        self._running = [self._threads.submit(asyncio.run, self._async())]

    def __enter__(self) -> Self:
        self._client = Client(self.addresses)
        for kind in (self._embed, self._embed, self._embed_iter, self._encode_stream):
            self._running.append(self._threads.submit(self._repeat, kind))
        return self

    def __exit__(self, *_: object) -> None:
        self.is_stopped = True
        self._threads.shutdown()
        self._client.close()

    def check(self) -> None:
        """Raise the first error of a call, or of a comparison."""
        for running in self._running:
            if running.done():
                running.result()

    def wait_for_calls(self, servers: Sequence[ServerProcess] = ()) -> None:
        """Wait until each method has succeeded twice more, and each of the servers has logged all of them."""
        before = dict(self.counts)
        while any(self.counts[name] < before[name] + 2 for name in before) or not all(
            f'"method": "{name}"' in server.log() for server in servers for name in ("Embed", "EncodeStream")
        ):
            self.check()
            time.sleep(0.01)

    def _repeat(self, call: Callable[[int], None]) -> None:
        for number in itertools.count():
            if self.is_stopped:
                return
            call(number)

    def _embed(self, number: int) -> None:
        index = number % len(TEXTS)
        self._compare("embed", self._client.embed(TEXTS[index : index + 1]), self.vectors[index : index + 1])

    def _embed_iter(self, _: int) -> None:
        batches = [batch.vectors for batch in self._client.embed_iter(TEXTS, batch_size=8)]
        self._compare("embed_iter", np.concatenate(batches), self.vectors)

    def _encode_stream(self, _: int) -> None:
        self._compare_texts(list(self._client.encode_stream(TEXTS)))

    async def _async(self) -> None:
        async with AsyncClient(self.addresses) as client:
            while not self.is_stopped:
                streamed, vectors, batches = await asyncio.gather(
                    all_of(client.encode_stream(TEXTS)),
                    client.embed(TEXTS),
                    all_of(client.embed_iter(TEXTS, batch_size=8)),
                )
                self._compare_texts(streamed)
                self._compare("embed", vectors, self.vectors)
                self._compare("embed_iter", np.concatenate([each.vectors for each in batches]), self.vectors)

    def _compare(self, method: str, vectors: Any, expected: Any) -> None:
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        self.counts[method] += 1

    def _compare_texts(self, texts: Sequence[EncodedText]) -> None:
        assert [text.tokens for text in texts] == self.tokens
        self.counts["encode_stream"] += 1


async def all_of(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]
