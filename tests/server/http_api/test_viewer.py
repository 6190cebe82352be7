"""The viewer of a real server process: access control, responses and shutdown."""

import asyncio
import base64
import http.client
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import pytest

from attnlens_client import AttentionQuery, Client
from attnlens_server.clients import Client as Sender
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.core.admission import Budget
from attnlens_server.http_api.exchange import HttpError, HttpRequest, HttpResponse
from attnlens_server.http_api.origins import OriginPolicy
from attnlens_server.http_api.viewer import ViewerRoutes
from attnlens_viewer.live import LiveModel
from served import ServerProcess

JSON = {"Content-Type": "application/json"}
FIRST, SECOND = "A man is playing a guitar.", "Someone plays an instrument."


class ViewerClient:
    """HTTP client for a viewer."""

    def __init__(self, url: str) -> None:
        self.port = urlsplit(url).port or 0

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, sent, JSON if headers is None else headers)
        reply = connection.getresponse()
        self.body = reply.read()
        connection.close()
        return reply

    def page(self, **fields: str) -> dict[str, Any]:
        assert self.ask("POST", "/page", fields).status == 200
        found: dict[str, Any] = json.loads(self.body)
        return found

    def rejection(self, status: int, *args: Any) -> tuple[str, str]:
        assert self.ask(*args).status == status
        response = json.loads(self.body)
        return response["reason"], response["error"]


@pytest.fixture
def viewer_client(viewer_url: str) -> ViewerClient:
    return ViewerClient(viewer_url)


def test_weights_match_the_protocol(viewer_client: ViewerClient, minilm_server: ServerProcess) -> None:
    found = viewer_client.page(text=FIRST)
    with Client(minilm_server.address) as client:
        [encoded] = client.encode([FIRST], attention=AttentionQuery())
    assert len(found["maps"]) == len(encoded.weights)
    for packed, weights in zip(found["maps"], encoded.weights, strict=True):
        content = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
        assert np.abs((content.reshape(weights.shape) / 255) ** 2 - weights).max() <= 1 / 255
    shown = [token.get("shown", token["text"]) for token in found["page"]["texts"][0]["tokens"]]
    assert shown == ["[CLS]", "A", "man", "is", "playing", "a", "guitar", ".", "[SEP]"]


def test_scores_match_the_protocol(viewer_client: ViewerClient, minilm_server: ServerProcess) -> None:
    page = viewer_client.page(text=FIRST, other=SECOND, rather_than="A man is eating.")["page"]
    with Client(minilm_server.address) as client:
        compared = client.compare(FIRST, SECOND, matrix="output", head_contributions=True)
        [contrast] = client.explain([FIRST], to=SECOND, rather_than="A man is eating.")
    assert compared.matrix is not None
    for text, side in zip(page["texts"], (compared.a, compared.b), strict=True):
        assert np.allclose(text["scores"][0]["values"], side.values, atol=1e-5)
        assert text["scores"][0]["sum"] == pytest.approx(compared.similarity, abs=1e-5)
        assert side.head_contributions is not None
        assert np.allclose(text["headContributions"], side.head_contributions, atol=1e-5)
    assert np.allclose(page["pair"]["values"], compared.matrix, atol=1e-5)
    assert page["pair"]["similarity"] == pytest.approx(compared.similarity, abs=1e-5)
    assert np.allclose(page["contrast"]["scores"]["values"], contrast.values, atol=1e-5)


def test_every_response_has_restrictive_headers(viewer_client: ViewerClient) -> None:
    for method, path in (("GET", "/"), ("GET", "/live.js"), ("GET", "/nowhere"), ("POST", "/page")):
        reply = viewer_client.ask(method, path)
        assert "default-src 'none'" in (reply.headers["Content-Security-Policy"] or "")
        assert "unsafe" not in reply.headers["Content-Security-Policy"]
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert not [name for name in reply.headers if name.lower().startswith("access-control")]


REJECTED_REQUESTS: dict[str, tuple[int, str, tuple[Any, ...]]] = {
    "another site's name": (421, "WRONG_HOST", ("GET", "/", None, {"Host": "evil.example:80"})),
    "public name that is not configured": (
        421,
        "WRONG_HOST",
        ("GET", "/", None, {"Host": "lens.example.org"}),
    ),
    "name that starts like a local one": (
        421,
        "WRONG_HOST",
        ("GET", "/", None, {"Host": "localhost.evil.example"}),
    ),
    "another site's page": (
        403,
        "WRONG_ORIGIN",
        ("POST", "/page", {"text": "a"}, {**JSON, "Origin": "http://evil.example"}),
    ),
    "sandboxed page": (403, "WRONG_ORIGIN", ("POST", "/page", {"text": "a"}, {**JSON, "Origin": "null"})),
    "link from another site": (
        403,
        "WRONG_ORIGIN",
        ("POST", "/page", {"text": "a"}, {**JSON, "Sec-Fetch-Site": "cross-site"}),
    ),
    "form from another site": (
        415,
        "WRONG_CONTENT_TYPE",
        ("POST", "/page", {"text": "a"}, {"Content-Type": "text/plain"}),
    ),
    "preflight request": (405, "METHOD_NOT_ALLOWED", ("OPTIONS", "/page")),
    "GET instead of POST": (405, "METHOD_NOT_ALLOWED", ("GET", "/page")),
    "path traversal": (404, "NO_SUCH_PATH", ("GET", "/../pyproject.toml")),
    "large body": (413, "REQUEST_TOO_LARGE", ("POST", "/page", b"x" * 300_000)),
    "invalid JSON": (400, "INVALID_FIELD", ("POST", "/page", b"{")),
    "deeply nested JSON": (400, "INVALID_FIELD", ("POST", "/page", b"[" * 200_000)),
    "not an object": (400, "INVALID_FIELD", ("POST", "/page", ["a"])),
    "number as text": (400, "INVALID_FIELD", ("POST", "/page", {"text": 1})),
    "lone surrogate": (400, "INVALID_FIELD", ("POST", "/page", {"text": "\ud800"})),
    "empty text": (400, "INVALID_FIELD", ("POST", "/page", {"text": ""})),
    "unknown field": (400, "INVALID_FIELD", ("POST", "/page", {"text": "a", "model": "b"})),
    "third text without a second": (
        400,
        "INVALID_FIELD",
        ("POST", "/page", {"text": "a", "rather_than": "b"}),
    ),
    "long text": (400, "INPUT_TOO_LONG", ("POST", "/page", {"text": "word " * 400})),
}


@pytest.mark.parametrize("case", REJECTED_REQUESTS)
def test_rejected_request_has_a_reason(viewer_client: ViewerClient, case: str) -> None:
    status, reason, args = REJECTED_REQUESTS[case]
    found, message = viewer_client.rejection(status, *args)
    assert found == reason
    assert message


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:80", "192.0.2.7"])
def test_localhost_and_ip_addresses_are_accepted_as_host(viewer_client: ViewerClient, host: str) -> None:
    assert viewer_client.ask("GET", "/", None, {"Host": host}).status == 200


ORIGIN = "https://lens.example.org"


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("lens.example.org", ORIGIN, 200),
        ("lens.example.org:8080", ORIGIN, 200),
        ("127.0.0.1:8080", ORIGIN, 200),  # a proxy that does not forward the host name
        ("192.0.2.7:8080", "http://192.0.2.7:8080", 200),
        ("lens.example.org", "http://lens.example.org:81", 403),
        ("lens.example.org", "https://evil.example", 403),
        ("lens.example.org", "null", 403),
        ("evil.example", ORIGIN, 421),
    ],
)
def test_public_origin_is_accepted_and_others_are_rejected(host: str, origin: str, status: int) -> None:
    policy = OriginPolicy("http", public_origin=ORIGIN, names=("0.0.0.0",), allowed_origins=())
    headers = {"host": host, "origin": origin, "content-type": "application/json"}
    try:
        policy.check("POST", headers, needs_page=True)
    except HttpError as error:
        assert error.http_status == status
    else:
        assert status == 200


BROWSER = {"user-agent": "Mozilla/5.0", "accept-language": "en"}
NODE = {"user-agent": "node", "accept-language": "*", "sec-fetch-mode": "cors"}
OTHER_USER_AGENT = {"user-agent": "node", "accept-language": "*"}
SECURE_BROWSER = {"sec-fetch-mode": "cors", "sec-fetch-site": "same-origin"}


@pytest.mark.parametrize(
    ("host", "headers", "status", "status_if_local"),
    [
        ("rebound.example:8080", BROWSER, 421, 421),
        ("rebound.example:8080", OTHER_USER_AGENT, 421, 421),
        ("rebound.example:8080", SECURE_BROWSER, 421, 421),
        ("rebound.example", {}, 200, 421),
        ("rebound.example", NODE, 200, 421),
        ("lens.example.org", BROWSER, 200, 200),
        ("127.0.0.1:8080", BROWSER, 200, 200),
        ("[::1]", BROWSER, 200, 200),
        ("attnlens:8080", BROWSER, 200, 200),
        ("host.docker.internal", {}, 200, 200),
        ("", {}, 200, 200),  # HTTP/1.0
    ],
)
def test_get_requests_are_not_accepted_under_public_names_of_others(
    host: str, headers: dict[str, str], status: int, status_if_local: int
) -> None:
    for is_local, expected in ((False, status), (True, status_if_local)):
        policy = OriginPolicy("http", public_origin=ORIGIN, names=(), allowed_origins=(), is_local=is_local)
        found = 200
        try:
            policy.check("GET", {"host": host, **headers}, needs_page=False)
        except HttpError as error:
            found = error.http_status
        assert found == expected
        policy.check("GET", {"host": host, **headers}, needs_page=False, is_open=False)  # pages know no key


def test_post_request_of_another_site_without_an_origin_is_rejected() -> None:
    policy = OriginPolicy("http", public_origin=None, names=(), allowed_origins=())
    policy.check("POST", {"host": "any.example"}, needs_page=False)
    with pytest.raises(HttpError) as caught:
        policy.check("POST", {"host": "127.0.0.1", "sec-fetch-site": "cross-site"}, needs_page=False)
    assert caught.value.http_status == 403


@pytest.mark.parametrize(
    "origin", ["lens.example.org", "https://lens.example.org/", "https://a b", "ftp://a", ""]
)
def test_public_origin_is_validated_at_startup(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"http_origin is .*: use scheme and host as shown by browsers"):
        ServerConfig(bundle=Path(), http_origin=origin)


@pytest.fixture
def without_explain(minilm_bundle: Path) -> Iterator[ServerProcess]:
    with ServerProcess(minilm_bundle, "--http-port", "0", "--no-explain") as server:
        yield server


def test_disabled_explanations_are_reported_and_attention_is_shown(without_explain: ServerProcess) -> None:
    viewer_client = ViewerClient(without_explain.http_url())
    page = viewer_client.page(text=FIRST, other=SECOND)["page"]
    assert [text["scores"] for text in page["texts"]] == [[], []]
    assert page["pair"] is None
    assert "shows only attention" in page["notes"][0]
    assert without_explain.stop() == 0
    with pytest.raises(ConnectionRefusedError):
        viewer_client.ask("GET", "/")


def test_port_in_use_aborts_startup(minilm_bundle: Path, viewer_url: str) -> None:
    port = str(urlsplit(viewer_url).port)
    with (
        pytest.raises(RuntimeError, match=f"cannot listen for HTTP on 127.0.0.1:{port}"),
        ServerProcess(minilm_bundle, "--http-port", port),
    ):
        pass


class SlowPages:
    """Pages that take until `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.model = LiveModel(name="m", num_layers=0, num_heads=0, max_tokens=8, can_explain=False)

    async def page(self, *_: object) -> Any:
        await self.go.wait()
        raise ValueError("too many tokens")


async def test_pages_of_one_client_do_not_keep_others_from_theirs() -> None:
    pages, service = SlowPages(), SimpleNamespace(process=SimpleNamespace(check_serving=lambda: None))
    routes = ViewerRoutes(cast("Any", service), cast("Any", pages), 1 << 20)

    def ask(client: str) -> "asyncio.Task[HttpResponse]":
        memory = SimpleNamespace(client=Sender(client))
        request = HttpRequest("POST", "/page", {}, b'{"text": "a"}', Budget(cast("Any", memory)))
        return asyncio.create_task(routes.page(request))

    busy = [ask(name) for name in ("a", "a", "b", "b", "c")]
    refused = await asyncio.gather(ask("a"), return_exceptions=True)
    assert [getattr(error, "http_status", 0) for error in refused] == [429]
    assert not any(task.done() for task in busy)
    pages.go.set()
    ended = await asyncio.gather(*busy, return_exceptions=True)
    assert [getattr(error, "http_status", 0) for error in ended] == [400] * 5
    assert not routes._num_pages
    routes.close()
