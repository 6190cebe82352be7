"""Protection of browsers: which web pages may call this server.

Requests of programs have no Origin header and are accepted under any host name. Browsers add it to requests
of web pages. These are accepted from this server's own pages, and from the origins that the operator allows
(CORS, which Starlette's middleware implements). An own page has a host that is an IP address, localhost or a
configured name, because whoever owns another name can point it at this server (DNS rebinding).
"""

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from attnlens_server.http_api.exchange import JSON, HttpError

_SAME_SITE = ("same-origin", "none")


class OriginPolicy:
    """Checks the host and the origin of requests.

    Args:
        scheme: `http` or `https`.
        public_origin: Address of the server in browsers, if a proxy is in front of it.
        names: Host names of the server, in addition to localhost and that of `public_origin`.
        allowed_origins: Other origins whose pages may call the API, or `*`.
    """

    def __init__(
        self,
        scheme: str,
        *,
        public_origin: str | None,
        names: Collection[str],
        allowed_origins: Collection[str],
    ) -> None:
        self._scheme = scheme
        self._public_origin = public_origin and public_origin.lower()
        self._configured = {name.lower() for name in names}
        self._names = {"localhost", *self._configured, urlsplit(self._public_origin or "").hostname}
        self._allowed = {origin.lower() for origin in allowed_origins}

    def check(self, method: str, headers: Mapping[str, str], *, needs_page: bool) -> None:
        """Check a request.

        Args:
            method: HTTP method.
            headers: Headers by lower-case name.
            needs_page: Whether the route belongs to the viewer, whose requests never come from other pages.

        Raises:
            HttpError: The host, the origin or the content type is not allowed.
        """
        origin = headers.get("origin")
        if not needs_page and (origin is None or self._allows(origin.lower())):
            return
        self._check_host(headers.get("host", "").lower())
        if needs_page and method == "GET":
            return  # links of other sites may lead to the page
        self._check_origin(headers, origin)
        if needs_page and headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise HttpError(415, "WRONG_CONTENT_TYPE", f"send {JSON}")

    def _allows(self, origin: str) -> bool:
        return "*" in self._allowed or origin in self._allowed

    def _check_host(self, host: str) -> None:
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
