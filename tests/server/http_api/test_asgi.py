"""The model as an ASGI application: mounted in Starlette, with its own lifespan, and with keys.

docs/http_native.md shows the same applications.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from attnlens_server.asgi import ModelApp, bearer_keys
from attnlens_server.config import ServerConfig
from attnlens_server.http_api.app import _own_path
from mounted import KEY, PREFIX, Mounted


def test_routes_of_a_mounted_model_work(mounted: Mounted) -> None:
    response = mounted.ask("POST", "/v1/embeddings", {"input": ["a", "b"]})
    assert (response.status, len(response.json["data"])) == (200, 2)
    assert mounted.ask("GET", "/healthz").json == {"status": "ok"}
    for path, content_type in (("/", "text/html"), ("/docs", "text/html"), ("/docs.js", "text/javascript")):
        response = mounted.ask("GET", path)
        assert (response.status, response.headers["content-type"].partition(";")[0]) == (200, content_type)
        assert "script-src 'self'" in response.headers["content-security-policy"]


def test_errors_of_a_mounted_model_have_the_dialect_of_the_route(mounted: Mounted) -> None:
    response = mounted.ask("POST", "/v1/embeddings", {"input": []})
    assert (response.status, response.json["error"]["param"]) == (400, "input")
    response = mounted.ask("POST", "/v1/attnlens/embed", {"inputs": []})
    assert (response.status, response.json["reason"]) == (400, "INVALID_FIELD")
    assert mounted.ask("GET", "/nothing").json["reason"] == "NO_SUCH_PATH"


def test_a_stream_ends_when_the_client_disconnects(mounted: Mounted) -> None:
    connection = mounted.connect()
    body = {"inputs": ["word " * 250] * 512, "attention": [{}]}
    connection.request(
        "POST",
        f"{PREFIX}/v1/attnlens/encode_stream",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}".encode()},
    )
    response = connection.getresponse()
    assert json.loads(response.readline())["num_attention_parts"] == 6
    app: Any = mounted.model._app
    admission = app._service.process.admission
    assert admission.memory.used > 0
    response.close()
    connection.close()
    deadline = time.monotonic() + 30
    while admission.memory.used or sum(pool.used for pool in admission._texts.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer ", "Bearer secre", "Bearer secret-e", "Basic secret-é", KEY]
)
def test_requests_without_a_valid_key_are_rejected(mounted: Mounted, authorization: str) -> None:
    for path, content in (("/v1/embeddings", {"input": "a"}), ("/v1/attnlens/embed", {"inputs": ["a"]})):
        response = mounted.ask("POST", path, content, Authorization=authorization)
        assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
        error = response.json["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith("the key is")
    for path in ("/healthz", "/docs", "/openapi.json", "/", "/live.js", "/page.css"):
        assert mounted.ask("GET", path, Authorization=authorization).status == 200
        assert mounted.ask("HEAD", path, Authorization=authorization).status == 200


def test_only_public_routes_need_no_key(mounted: Mounted) -> None:
    app: Any = mounted.model._app
    for path, methods in {**app._paths, **app._prefixes}.items():
        for method, route in methods.items():
            if not route.is_public:
                assert mounted.ask(method, path, Authorization="").status == 401
            for variant in (f"{path}/", f"/{path}", path.upper(), f"{path}%2F", f"{path};a", f"{path}/."):
                if variant not in app._paths:
                    assert mounted.ask(method, variant, b"{}", Authorization="").status in (401, 404, 405)


def test_rejections_have_the_dialect_of_the_route(mounted: Mounted) -> None:
    response = mounted.ask("POST", "/v1/embeddings", {"input": "a"}, Authorization="Bearer x")
    assert response.json["error"]["type"] == "authentication_error"
    response = mounted.ask("GET", "/v1/attnlens/models", Authorization="Bearer x")
    assert response.json["reason"] == "UNAUTHENTICATED"


def test_clients_are_named_after_their_keys() -> None:
    authenticate = bearer_keys(["one", "two"])
    names = [str(authenticate({"authorization": f"bearer {key}"})) for key in ("one", "two", "one")]
    assert names[0] == names[2] != names[1]
    assert "one" not in names[0]


@pytest.mark.parametrize("keys", [[], [""], ["one", ""]])
def test_empty_keys_are_rejected(keys: list[str]) -> None:
    with pytest.raises(ValueError, match="pass at least one key"):
        bearer_keys(keys)


@pytest.mark.parametrize(
    ("root_path", "path", "expected"),
    [
        ("", "/docs", "/docs"),
        ("/lens", "/lens/docs", "/docs"),
        ("/lens/", "/lens/docs", "/docs"),
        ("/lens", "/lens/", "/"),
        ("/lens", "/docs", "/docs"),  # a proxy has removed the prefix
        ("/len", "/lens/docs", "/lens/docs"),
    ],
)
def test_prefix_is_removed_from_the_path(root_path: str, path: str, expected: str) -> None:
    assert _own_path({"root_path": root_path, "path": path}) == expected


class Lifespan:
    """Runs the lifespan protocol of an application like an ASGI server."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.requests = 0

    async def run(self, app: ModelApp) -> None:
        events = iter(["lifespan.startup", "lifespan.shutdown"])

        async def receive() -> dict[str, Any]:
            event = next(events)
            if event == "lifespan.shutdown":
                assert await self.status(app, "/readyz") == 200
                with pytest.raises(RuntimeError, match="is open already"):
                    async with app.open():
                        pass
            return {"type": event}

        await app({"type": "lifespan"}, receive, self._record)

    async def _record(self, message: Any) -> None:
        self.sent.append(message)

    async def status(self, app: ModelApp, path: str) -> int:
        """Send a request and return the status."""
        messages: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        await app({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)
        status: int = messages[0]["status"]
        return status


async def test_lifespan_opens_and_closes_the_model(minilm_bundle: Path) -> None:
    app, lifespan = ModelApp(ServerConfig(bundle=minilm_bundle, threads=1, lanes=1)), Lifespan()
    await lifespan.run(app)
    assert [message["type"] for message in lifespan.sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    with pytest.raises(RuntimeError, match=r"async with app.open\(\)"):
        await lifespan.status(app, "/readyz")


async def test_a_failed_start_is_reported(tmp_path: Path) -> None:
    lifespan = Lifespan()
    await lifespan.run(ModelApp(ServerConfig(bundle=tmp_path)))
    [failure] = lifespan.sent
    assert failure["type"] == "lifespan.startup.failed"
    assert str(tmp_path) in failure["message"]
