"""Server under test, with the expected vectors and a method to overload it."""

import json
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

QUERY = "How do I reset a forgotten password?"
TEXTS = ["It rained.", "Naïve café 😀", "Choose a new password with at least twelve characters."]
SOME = [f"Passage {number} of forty." for number in range(40)]
MANY = [f"Passage {number} of a thousand." for number in range(1000)]
"""As many texts as LangChain sends in a request by default."""
LONG = "word " * 400
SLOW = [f"{LONG} {number}" for number in range(200)]
"""More than a second of computation, if they are truncated."""
DIMENSIONS = 64
RERANK_QUERY = "the man and the sea"
DOCUMENTS = ["it rained", "a café in the sea", "", "the man", "東京 😀"]
LONG_DOCUMENT = "the man and the sea " * 20
"""120 tokens. The reranker reads 34 of a query and a document."""
MAX_INPUTS, MAX_CALL_MEMORY_BYTES, HOLDERS = 2048, 32 << 20, 4
BODY_COPIES = 3
"""Multiple of the size of a body that the server reserves."""
ARGUMENTS = [
    *("--http-port", "0"),
    # Small for `Server.full`. The server uses at least five times the size of a response.
    *(
        "--max-call-memory-bytes",
        str(MAX_CALL_MEMORY_BYTES),
        "--max-response-bytes",
        str(MAX_CALL_MEMORY_BYTES // 8),
    ),
    *("--request-timeout-s", "300"),
]
TIMEOUT_S = 60


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: URL without a trailing slash.
        model: Name of the model.
        vectors: Vectors from the gRPC API. Keys are the names of the constants above in lower case, and for
            `TEXTS` also `short` (with `DIMENSIONS`), `raw` (not normalized) and `tokens`.
        reranker_url: URL of a server with a reranker named `reranker`.
        classifier_url: URL of a server with a classifier.
        ranking: Index and score of each of `DOCUMENTS` for `RERANK_QUERY`, sorted, from the gRPC API.
        labels: Labels of `RERANK_QUERY` and their probabilities, sorted, from the gRPC API.
    """

    url: str
    model: str
    vectors: dict[str, list[Any]]
    reranker_url: str
    classifier_url: str
    ranking: list[tuple[int, float]]
    labels: list[tuple[str, float]]

    @classmethod
    def read(cls, path: Path) -> "Server":
        """Read a JSON file with the attributes."""
        return cls(**json.loads(path.read_text("utf-8")))

    def check(self, found: Any, name: str) -> None:
        """Check that vectors equal the expected ones, bit for bit."""
        expected = self.vectors[name]
        assert len(found) == len(expected), f"{len(found)} vectors instead of {len(expected)}"
        for row, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(row, np.float64).astype(np.float32), np.float32(wanted))

    @property
    def reranker(self) -> "Server":
        """The server of the reranker."""
        return replace(self, url=self.reranker_url, model="reranker")

    def check_ranking(self, found: Iterable[tuple[int, float]]) -> None:
        """Check that indices and scores are the first ones of the expected ranking."""
        pairs = [tuple(each) for each in found]
        assert pairs, "no documents"
        assert pairs == [tuple(each) for each in self.ranking[: len(pairs)]]

    def metric(self, name: str) -> float:
        """Return the current value of a metric, with its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT_S) as response:
            text = response.read().decode()
        match = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def wait_for_metric(self, name: str, value: float) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)} instead of {value}"
            time.sleep(0.01)

    @contextmanager
    def full(self) -> Iterator[Callable[[], None]]:
        """Take the share of memory of this address, so that it is rejected. Yield a function that frees it.

        The memory is reserved by requests whose last byte is not sent.
        """
        address = urlsplit(self.url)
        # A client may hold two thirds of the memory.
        size = MAX_CALL_MEMORY_BYTES * 2 // 3 // BODY_COPIES // HOLDERS
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {size + 1}\r\n\r\n"
        with ExitStack() as holders:

            def release() -> None:
                holders.close()
                self.wait_for_metric("attnlens_reserved_memory_bytes", 0)

            for _ in range(HOLDERS):
                holder = socket.create_connection((address.hostname or "", address.port or 0), TIMEOUT_S)
                holders.enter_context(holder)
                holder.sendall(head.encode() + bytes(size))
            self.wait_for_metric("attnlens_reserved_memory_bytes", BODY_COPIES * size * HOLDERS)
            yield release
            release()

    @contextmanager
    def drops_work(self) -> Iterator[None]:
        """Check that the server drops `SLOW`, requested in the block, when the client disconnects."""
        name = 'attnlens_batch_inputs_total{graph="embeddings"}'
        before = self.metric(name)
        yield
        self.wait_for_metric('attnlens_queue_inputs{graph="embeddings"}', 0)
        self.wait_for_metric("attnlens_reserved_memory_bytes", 0)
        assert self.metric(name) - before < len(SLOW)


@contextmanager
def raises(kind: type[BaseException], *messages: str) -> Iterator[Any]:
    """Check that the block raises an error of exactly this type whose message contains the texts.

    Yields a list, which contains the error afterwards.
    """
    errors: list[BaseException] = []
    try:
        yield errors
    except kind as error:
        assert type(error) is kind, f"{type(error)} instead of {kind}: {error}"
        for message in messages:
            assert message in str(error), f"{message!r} is not in {error!s}"
        errors.append(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
