"""Protection of browsers: which web pages may call this server.

Browsers add the Origin header to requests of web pages, except for GET requests to the origin of the page.
Requests with it are accepted from this server's own pages, and from the origins that the operator allows
(CORS, which Starlette's middleware implements). An own page has a host that is an IP address, localhost or a
configured name, because whoever owns another name can point it at this server (DNS rebinding).

Requests of programs have no Origin header. They are accepted under any host name, except for GET requests
that need neither a key nor TLS: if they may come from a browser, or if the server listens for this machine
only, the host must not be a public name that is not configured.
"""

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from attnlens_server.http_api.exchange import JSON, HttpError

_SAME_SITE = ("same-origin", "none")
_PRIVATE_DOMAINS = ("localhost", "local", "internal")  # nobody can own a name in them
# Pages cannot remove all of these headers from requests of browsers.
_BROWSER_HEADERS = ("sec-fetch-site", "accept-language", "cookie", "referer")


class OriginPolicy:
    """Checks the host and the origin of requests.

    Args:
        scheme: `http` or `https`.
        public_origin: Address of the server in browsers, if a proxy is in front of it.
        names: Host names of the server, in addition to localhost and that of `public_origin`.
        allowed_origins: Other origins whose pages may call the API, or `*`.
        is_local: Whether only this machine can connect.
    """

    def __init__(
        self,
        scheme: str,
        *,
        public_origin: str | None,
        names: Collection[str],
        allowed_origins: Collection[str],
        is_local: bool = False,
    ) -> None:
        self._scheme = scheme
        self._is_local = is_local
        self._public_origin = public_origin and public_origin.lower()
        self._configured = {name.lower() for name in names}
        self._names = {"localhost", *self._configured, urlsplit(self._public_origin or "").hostname}
        self._allowed = {origin.lower() for origin in allowed_origins}

    def check(
        self, method: str, headers: Mapping[str, str], *, needs_page: bool, is_open: bool = True
    ) -> None:
        """Check a request.

        Args:
            method: HTTP method of the route.
            headers: Headers by lower-case name.
            needs_page: Whether the route belongs to the viewer, whose requests never come from other pages.
            is_open: Whether the response contains something that others must not read, and needs no key.

        Raises:
            HttpError: The host, the origin or the content type is not allowed.
        """
        origin = headers.get("origin")
        if not needs_page and origin is None:
            self._check_program(method, headers, is_open=is_open)
            return
        if not needs_page and origin is not None and self._allows(origin.lower()):
            return
        self._check_host(headers.get("host", "").lower())
        if needs_page and method == "GET":
            return  # links of other sites may lead to the page
        self._check_origin(headers, origin)
        if needs_page and headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise HttpError(415, "WRONG_CONTENT_TYPE", f"send {JSON}")

    def _allows(self, origin: str) -> bool:
        return "*" in self._allowed or origin in self._allowed

    def _check_program(self, method: str, headers: Mapping[str, str], *, is_open: bool) -> None:
        """Check a request without an origin, such as a GET request of a page to its own origin."""
        if method != "GET":
            self._check_origin(headers, None)
        elif is_open and self._scheme == "http" and (self._is_local or _may_be_browser(headers)):
            host = headers.get("host", "").lower()
            if host and not _is_private(_name(host)):
                self._check_host(host)

    def _check_host(self, host: str) -> None:
        name = _name(host)
        if name in self._names:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise HttpError(
                421,
                "WRONG_HOST",
                f"this server does not accept the host name {name[:80]!r} from browsers: use its IP address, "
                "or start it with --http-origin, for instance --http-origin https://lens.example.org",
            ) from None

    def _check_origin(self, headers: Mapping[str, str], origin: str | None) -> None:
        known = (None, f"{self._scheme}://{headers.get('host', '')}", self._public_origin)
        if origin not in known or headers.get("sec-fetch-site", "same-origin") not in _SAME_SITE:
            raise HttpError(
                403,
                "WRONG_ORIGIN",
                f"this server does not accept requests from the origin {(origin or 'unknown')[:80]!r}: allow "
                "it with --cors-origins, or with --http-origin if it is this server's own public address",
            )


def _name(host: str) -> str:
    """Return the name or address in a Host header."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.removeprefix("[").removesuffix("]")


def _is_private(name: str) -> bool:
    """Return whether a name has no owner in the public DNS, so that nobody can point it at this server."""
    _, dot, domain = name.rstrip(".").rpartition(".")
    return not dot or domain in _PRIVATE_DOMAINS


def _may_be_browser(headers: Mapping[str, str]) -> bool:
    if "sec-fetch-mode" in headers and "sec-fetch-site" not in headers:
        return False  # Node.js. Browsers send both or none, and pages cannot set them
    return "mozilla" in headers.get("user-agent", "").lower() or any(
        name in headers for name in _BROWSER_HEADERS
    )
