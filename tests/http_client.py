"""HTTP requests as other clients send them, and a service without a model behind the routes."""

import asyncio
import http.client
import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from attnlens_client import Client
from attnlens_server.access import Access
from attnlens_server.core.admission import Admission, Budget
from attnlens_server.core.usage import Timings, Usage
from attnlens_server.http_api.app import HttpApp
from attnlens_server.http_api.exchange import Route
from attnlens_server.http_api.identity import AccessGate
from attnlens_server.http_api.origins import OriginPolicy
from attnlens_server.observing.observer import Observer
from attnlens_server.operations.documents import ScoreRequest
from attnlens_server.operations.embed import EmbedRequest, EmbedResult
from attnlens_server.operations.score import ScoreResult
from served import ServerProcess

TEXTS = ["A man is playing a guitar.", "Füße & naïveté", "It rained."]
LONG = "word " * 400


class HttpClient:
    """Sends requests without a Content-Type header. `headers` belong to the last response."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self.headers: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON value, or None for an empty body."""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self._connection.request(method, path, sent)
        response = self._connection.getresponse()
        content = response.read()
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self._connection.close()  # other tests may run for longer than the server keeps it
        return response.status, json.loads(content) if content else None

    def post(self, path: str, body: Any) -> Any:
        status, value = self.ask("POST", path, body)
        assert status == 200, value
        return value


class HeadServer:
    """Server of a classifier or reranker, with clients of both of its ports."""

    def __init__(self, bundle: Path) -> None:
        self._process = ServerProcess(bundle, "--http-port", "0", "--max-inputs-per-request", "40")

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._process)
            self.grpc = stack.enter_context(Client(self._process.address))
            self.url = self._process.http_url()
            self.http = stack.enter_context(HttpClient(self.url))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def documented_requests(title: str) -> list[tuple[str, Any]]:
    """Return the paths and bodies of the curl commands in a section of docs/http.md."""
    page = Path(__file__).parents[1].joinpath("docs", "http.md").read_text("utf-8")
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    commands = re.findall(r"\$ curl -s http://127\.0\.0\.1:8080(\S+) -d '(.*?)'", section, re.DOTALL)
    return [(path, json.loads(body.replace("\\\n", ""))) for path, body in commands]


def grpc_embeddings(address: str, texts: list[str], **options: Any) -> npt.NDArray[np.float32]:
    """Return the embeddings that the gRPC API returns."""
    with Client(address) as client:
        return np.asarray(client.embed(texts, **options), np.float32)


def same_bits(value: Any, expected: npt.NDArray[np.float32] | None) -> bool:
    """Return whether JSON lists have the values of an array."""
    assert expected is not None
    found = np.asarray(value, np.float32)
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


def posted(path: str) -> dict[str, Any]:
    """Return the ASGI scope of a POST request."""
    return {"type": "http", "method": "POST", "path": path, "headers": [], "client": None}


class StubService:
    """Service behind routes that returns `embeddings`, or raises `error`. `request` is the last request."""

    def __init__(self, embeddings: npt.NDArray[np.float32], *, truncation_side: str = "right") -> None:
        self.embeddings = embeddings
        self.truncation_side = truncation_side
        self.max_inputs = 512
        self.max_tokens = 256
        self.error: Exception | None = None
        self.request: Any = EmbedRequest(inputs=())
        self.admission = Admission(8, 1 << 20, lambda _: 1.0)
        self.process = self.model = self.workers = self

    async def run_if(self, _: bool, function: Any, *args: Any) -> Any:
        return function(*args)

    def check_serving(self) -> None:
        pass

    async def embed(self, request: EmbedRequest, _: Budget) -> EmbedResult:
        self.request = request
        if self.error is not None:
            raise self.error
        return EmbedResult(self.embeddings, [Usage(3, 3)] * len(self.embeddings), Timings(0, 0, 0))

    async def score(self, request: ScoreRequest, _: Budget) -> ScoreResult:
        self.request = request
        raise self.error or NotImplementedError

    def app(self, routes: Iterable[Route]) -> HttpApp:
        """Return an application with these routes."""
        return HttpApp(
            cast("Any", self),
            routes,
            OriginPolicy("http", public_origin=None, names=(), allowed_origins=()),
            AccessGate(Access("model")),
            max_body_bytes=1 << 16,
            body_timeout_s=60,
            stall_timeout_s=60,
            observer=Observer(),
        )

    def post(self, routes: Iterable[Route], path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        """Return status, headers and JSON value of the response to a request."""
        sent: list[Any] = []
        received = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return received.pop() if received else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(routes)(posted(path), receive, send))
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], headers, json.loads(sent[1]["body"])
