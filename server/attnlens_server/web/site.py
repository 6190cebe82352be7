"""Paths of the viewer and protection against requests from other sites.

Requests that a page of another site could make a browser send are rejected: a Host that is an unknown name
(DNS rebinding), an unknown Origin, and a body that is not JSON (browsers send JSON to other sites only after
a preflight, which is rejected). No reply grants anything to other origins.
"""

import ipaddress
import json
import math
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from attnlens_server.config import ServerConfig
from attnlens_server.errors import InputTooLongError, RequestError, StartupError
from attnlens_server.listening import TcpAddress
from attnlens_server.listening.bind_problems import bind_problem
from attnlens_server.serving.admission import Budget, Reservation
from attnlens_server.serving.execution import Workers
from attnlens_server.serving.results import CallMetrics
from attnlens_server.serving.service import ModelService
from attnlens_server.web.http_server import HttpError, HttpReply, HttpRequest, HttpServer
from attnlens_server.web.pages import Form, Pages
from attnlens_viewer.live import POLICY, live_files, live_reply

MAX_PAGES = 2  # concurrently, since gRPC has priority
PAGE_TIMEOUT_S = 60.0
_JSON = "application/json"
_FIELDS = {"text": "the text", "other": "the second text", "rather_than": "the third text"}
# The form field of each field path in the requests that `Pages` makes.
_FORM_FIELDS = {
    "inputs[0]": "text",
    "pairs[0].a": "text",
    "inputs[1]": "other",
    "pairs[0].b": "other",
    "contrast.to": "other",
    "contrast.rather_than": "rather_than",
    "contrast": "rather_than",
}
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class Viewer:
    """Viewer of one model."""

    def __init__(self, service: ModelService, pages: Pages, config: ServerConfig) -> None:
        self._service = service
        self._pages = pages
        self._host = config.viewer_host.lower()
        self._scheme = "http" if config.tls_cert is None else "https"
        self._public_origin = config.viewer_origin and config.viewer_origin.lower()
        self._names = {"localhost", self._host, urlsplit(self._public_origin or "").hostname}
        self._max_bytes = config.max_response_bytes
        self._files = live_files(pages.model)
        self._worker = Workers(1)  # serializes pages, separately from the workers of gRPC
        self._num_pages = 0
        self._server = HttpServer(
            self.answer,
            error_reply,
            self.check_host,
            stall_timeout_s=config.stall_timeout_s,
            log_requests=config.log_requests,
        )

    async def listen(self, port: int, context: ssl.SSLContext | None) -> str:
        """Listen and return the URL of the page.

        Raises:
            StartupError: The address cannot be bound.
        """
        address = TcpAddress(self._host, port)
        try:
            bound = await self._server.start(self._host, port, context)
        except OSError as error:
            reason = bind_problem(error, address, "viewer-port")
            raise StartupError(f"the viewer cannot listen on {address}: {reason}") from error
        return f"{self._scheme}://{TcpAddress(self._host, bound)}/"

    async def stop(self, timeout_s: float) -> None:
        """Reject new requests and end running ones."""
        await self._server.stop(timeout_s)
        self._worker.close()

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Reject unknown host names: whoever owns a name can point it at this server (DNS rebinding).

        Raises:
            HttpError: The host is an unknown name.
        """
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.removeprefix("[").removesuffix("]")
        if name in self._names:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise HttpError(
                421,
                "WRONG_HOST",
                f"this server does not accept the host name {name[:80]!r}: use its IP address, or start it "
                "with --viewer-origin, for instance --viewer-origin https://lens.example.org",
            ) from None

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Return the response to a request.

        Raises:
            HttpError: The request is rejected.
        """
        path = request.target
        if request.method == "GET":
            if path == "/favicon.ico":
                return HttpReply(204, "image/x-icon", b"", _HEADERS)
            if path in self._files:
                file = self._files[path]
                return HttpReply(200, file.content_type, file.content, _HEADERS)
        if path != "/page" and (path not in self._files or request.method == "GET"):
            raise HttpError(404, "NO_SUCH_PATH", "unknown path: the page is at /")
        allowed = "POST" if path == "/page" else "GET"
        if request.method != allowed:
            raise HttpError(405, "METHOD_NOT_ALLOWED", f"use {allowed}", {"Allow": allowed})
        self._check_origin(request.headers)
        form = _parse_form(request.body)
        if self._num_pages >= MAX_PAGES:
            message = f"{MAX_PAGES} other pages are in progress, which is the limit: try again soon"
            raise HttpError(429, "OVERLOADED", message, {"Retry-After": "1"})
        self._num_pages += 1
        try:
            return await self._page(form, request.metrics)
        finally:
            self._num_pages -= 1

    async def _page(self, form: Form, metrics: CallMetrics) -> HttpReply:
        memory = Reservation(self._service.admission)
        metrics.num_inputs = sum(text is not None for text in (form.text, form.other, form.rather_than))
        try:
            self._service.check_serving()
            budget = Budget(memory, time.monotonic() + PAGE_TIMEOUT_S, metrics)
            page = await self._pages.page(form, budget)
            body = await self._worker.run(live_reply, page, self._max_bytes)
            memory.grow(len(body))
        except BaseException as error:
            memory.release()
            if isinstance(error, RequestError):
                raise _http_error(error) from error
            if isinstance(error, ValueError):
                raise HttpError(400, "INVALID_FIELD", str(error)) from error
            raise
        return HttpReply(200, _JSON, body, _HEADERS, memory.release)

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Reject requests from pages of other sites.

        Raises:
            HttpError: The request is rejected.
        """
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        known = (None, f"{self._scheme}://{headers['host']}", self._public_origin)
        if origin not in known or site not in ("same-origin", "none"):
            raise HttpError(
                403,
                "WRONG_ORIGIN",
                f"this server does not accept requests from the origin {(origin or 'unknown')[:80]!r}: if "
                "this is its own public address, start it with --viewer-origin",
            )
        if headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            raise HttpError(415, "WRONG_CONTENT_TYPE", f"send {_JSON}")


async def start_viewer(
    service: ModelService, pages: Pages, config: ServerConfig, context: ssl.SSLContext | None
) -> tuple[Viewer, str]:
    """Start the viewer and return it with the URL of the page.

    Raises:
        StartupError: The address cannot be bound.
    """
    viewer = Viewer(service, pages, config)
    return viewer, await viewer.listen(config.viewer_port or 0, context)


def error_reply(error: HttpError) -> HttpReply:
    """Return the response for an error."""
    field = {} if error.field is None else {"field": error.field}
    body = json.dumps({"error": str(error), "reason": error.reason, **field}).encode()
    return HttpReply(error.status, _JSON, body, {**_HEADERS, **error.headers})


def _http_error(error: RequestError) -> HttpError:
    after = error.retry_after_s
    headers = {} if after is None else {"Retry-After": str(math.ceil(after))}
    field, message = _form_error(error)
    return HttpError(_STATUSES.get(error.status, 500), error.reason, message, headers, field=field)


def _form_error(error: RequestError) -> tuple[str | None, str]:
    """Return the form field of an error, or None, and a message with the label of the field."""
    for violation in error.violations:
        field = _FORM_FIELDS.get(violation.field.removesuffix(".text"))
        if field is None:
            continue
        description = violation.description
        if isinstance(error, InputTooLongError):  # the form has no `truncate`
            num_tokens, max_tokens = error.metadata["num_tokens"], error.metadata["max_tokens"]
            description = f"has {num_tokens} tokens, but the limit is {max_tokens}: shorten it"
        elif violation.field == "contrast":
            description = "has the same embedding as the second text: enter another text"
        return field, f"{_FIELDS[field]} {description}"
    return None, error.message


def _parse_form(body: bytes) -> Form:
    """Parse the JSON body of a form.

    Raises:
        HttpError: The body is invalid.
    """
    try:
        content: Any = json.loads(body.decode())
        fields = {name: value for name, value in content.items() if value not in (None, "")}
        for value in fields.values():
            value.encode()  # raises an error for lone surrogates
    except (ValueError, RecursionError, AttributeError) as error:
        raise _invalid("the body is not a JSON object of texts: send one") from error
    unknown = next((name for name in fields if name not in _FIELDS), None)
    if unknown is not None:
        raise _invalid(f"unknown field {unknown[:40]!r}: use {', '.join(_FIELDS)}")
    if "text" not in fields:
        raise _invalid("the text is empty: enter a text", "text")
    if "rather_than" in fields and "other" not in fields:
        raise _invalid("the second text is empty: enter the text to compare with the third one", "other")
    return Form(**fields)


def _invalid(message: str, field: str | None = None) -> HttpError:
    return HttpError(400, "INVALID_FIELD", message, field=field)
