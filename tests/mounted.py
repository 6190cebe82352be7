"""A model mounted under /lens in a Starlette application, served by uvicorn in a thread."""

import http.client
import json
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from attnlens_server.asgi import ModelApp, bearer_keys
from attnlens_server.config import ServerConfig

KEY = "secret-é"
PREFIX = "/lens"
JSON = "application/json"


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Mounted:
    """The application and its server, as a context manager."""

    def __init__(self, bundle: Path, **settings: Any) -> None:
        config = ServerConfig(bundle=bundle, lanes=1, threads=1, **settings)
        self.model = ModelApp(config, authenticate=bearer_keys({KEY, "other"}))

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None]:
            async with self.model.open():
                yield

        app = Starlette(routes=[Mount(PREFIX, self.model)], lifespan=lifespan)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_keep_alive=600))
        self._thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self._connection = self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self.server.should_exit = True
        self._thread.join()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        """Send a request on the shared connection, with a valid key unless the headers replace it."""
        self.send(self._connection, method, path, body, **headers)
        reply = self._connection.getresponse()
        return Response(reply.status, dict(reply.headers.items()), reply.read())

    @staticmethod
    def send(
        connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str
    ) -> None:
        """Send a request without waiting for the response."""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": JSON, **headers}
        encoded = {name: value.encode() for name, value in headers.items()}
        connection.request(method, PREFIX + path, sent, encoded)
