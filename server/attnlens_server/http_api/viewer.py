"""Routes of the viewer: its page, its files, and the results of its form."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from attnlens_server.core.admission import Budget
from attnlens_server.core.execution import Workers
from attnlens_server.errors import InputTooLongError, RequestError
from attnlens_server.http_api.exchange import (
    JSON,
    PUBLIC,
    Dialect,
    HttpError,
    HttpRequest,
    HttpResponse,
    Route,
)
from attnlens_server.http_api.pages import Form, Pages
from attnlens_server.operations.service import ModelService
from attnlens_viewer.live import POLICY, LiveFile, live_files, live_reply

PAGE = ("Encode", "Explain", "Compare")
"""Methods that compute a result of the form."""
MAX_PAGES = 2  # concurrently for one client, since other requests have priority
MAX_FORM_BYTES = 256 << 10
PAGE_TIMEOUT_S = 60.0
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
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class ViewerRoutes:
    """Routes of the viewer of one model.

    Args:
        service: Service of the model.
        pages: Pages of the model.
        max_bytes: Maximum size of a result.
    """

    def __init__(self, service: ModelService, pages: Pages, max_bytes: int) -> None:
        self._service = service
        self._pages = pages
        self._max_bytes = max_bytes
        self._worker = Workers(1)  # serializes pages, separately from the workers of other requests
        self._num_pages = Counter[str]()  # of each client

    def routes(self) -> list[Route]:
        """Return the routes. The files are public, because browsers open a page without a key."""
        files = {"/favicon.ico": LiveFile("image/x-icon", b""), **live_files(self._pages.model)}
        routes = [
            Route("GET", path, partial(_send_file, file), DIALECT, PUBLIC, needs_page=True)
            for path, file in files.items()
        ]
        return [*routes, Route("POST", "/page", self.page, DIALECT, PAGE, needs_page=True)]

    def close(self) -> None:
        """Stop the worker thread."""
        self._worker.close()

    async def page(self, request: HttpRequest) -> HttpResponse:
        """Return the results for the texts of the form.

        Raises:
            HttpError: The form is invalid, or too many pages are in progress.
            RequestError: See `attnlens_server.errors`.
        """
        form = _parse_form(request.body)
        client = request.budget.client.name
        if self._num_pages[client] >= MAX_PAGES:
            message = f"{MAX_PAGES} of your pages are in progress, which is the limit: try again soon"
            raise HttpError(429, "OVERLOADED", message, {"Retry-After": "1"})
        self._num_pages[client] += 1
        try:
            return HttpResponse(await self._result(form, request.budget))
        except ValueError as error:
            raise HttpError(400, "INVALID_FIELD", str(error)) from error
        finally:
            self._num_pages[client] -= 1
            if not self._num_pages[client]:
                del self._num_pages[client]

    async def _result(self, form: Form, budget: Budget) -> bytes:
        budget.metrics.num_inputs = sum(
            text is not None for text in (form.text, form.other, form.rather_than)
        )
        self._service.process.check_serving()
        limited = Budget(budget.memory, time.monotonic() + PAGE_TIMEOUT_S, budget.metrics)
        page = await self._pages.page(form, limited)
        body = await self._worker.run(live_reply, page, self._max_bytes)
        budget.memory.grow(len(body))
        return body


async def _send_file(file: LiveFile, request: HttpRequest) -> HttpResponse:
    del request
    status = 200 if file.content else 204
    return HttpResponse(file.content, status, file.content_type)


def _error_body(error: RequestError) -> Mapping[str, Any]:
    field, message = _form_error(error)
    body = {"error": message, "reason": error.reason}
    return body if field is None else {**body, "field": field}


DIALECT = Dialect(_error_body, headers=_HEADERS)


def _form_error(error: RequestError) -> tuple[str | None, str]:
    """Return the form field of an error, or None, and a message with the label of the field."""
    if isinstance(error, HttpError):
        return error.field, error.message
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
    if len(body) > MAX_FORM_BYTES:
        message = f"forms are limited to {MAX_FORM_BYTES} bytes: shorten the texts"
        raise HttpError(413, "REQUEST_TOO_LARGE", message)
    try:
        content: Any = json.loads(body.decode())
        fields = {name: value for name, value in content.items() if value not in (None, "")}
        for value in fields.values():
            value.encode()  # raises an error for lone surrogates
    except (ValueError, RecursionError, AttributeError) as error:
        raise _invalid(f"the body is not a JSON object of texts: send {JSON}") from error
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
