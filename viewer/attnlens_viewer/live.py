"""Static files and JSON responses of the web page that a server hosts.

The response to a submitted form contains the same data as an HTML file: the page and its attention maps.
Untrusted text is sent only as JSON, which the script inserts as text content.
"""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from attnlens_viewer.document import asset, encoded_maps
from attnlens_viewer.encoding import SMALL_ROW, to_base64
from attnlens_viewer.page import Page
from attnlens_viewer.page_json import page_json

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of every response: only scripts, styles and requests of the same origin."""

_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="stylesheet" href="page.css">
<script src="live.js" defer></script>
</head>
<body>
<main id="attnlens" data-model="{model}"></main>
<noscript>This page draws its results with its own script: allow scripts to see them.</noscript>
</body>
</html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """Model information for the start page.

    Attributes:
        can_explain: Whether the server computes contributions.
        labels: Labels of a classifier. A reranker has one. Empty for an embedding model.
        takes_pairs: Whether a pair of texts can be one input.
        comparison: Comparison with the publisher's own pipeline, in one line.
    """

    name: str
    num_layers: int
    num_heads: int
    max_tokens: int
    can_explain: bool
    labels: Sequence[str] = ()
    takes_pairs: bool = False
    comparison: str = ""


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A static file to serve."""

    content_type: str
    content: bytes


def live_files(model: LiveModel) -> dict[str, LiveFile]:
    """Return the static files of the page by URL path."""
    shell = _SHELL.format(
        title=html.escape(f"{model.name} - attnlens"), model=html.escape(json.dumps(asdict(model)))
    )
    return {
        "/": LiveFile("text/html; charset=utf-8", shell.encode()),
        "/live.js": LiveFile("text/javascript; charset=utf-8", asset("live.js").encode()),
        "/page.css": LiveFile("text/css; charset=utf-8", asset("page.css").encode()),
    }


def live_reply(page: Page, max_bytes: int) -> bytes:
    """Return the JSON response with the `page` and the base64-encoded `maps` of each text and layer.

    If the complete maps exceed `max_bytes`, only the 32 largest weights of each row are kept, and the page
    displays a notice.

    Raises:
        ValueError: The reduced maps exceed `max_bytes`, or a weight is not between 0 and 1.
    """
    kept, reason = None, ""
    maps = encoded_maps(page, None, max_bytes)
    if maps is None:
        kept, reason = SMALL_ROW, "size"
        maps = encoded_maps(page, kept, max_bytes)
    if maps is None:
        raise ValueError(
            f"the attention maps exceed {max_bytes:,} bytes even with only the {SMALL_ROW} largest weights "
            "of each row. Shorten the text."
        )
    response = {
        "page": page_json(page, kept=kept, reason=reason),
        "maps": [to_base64(content) for content in maps.values()],
    }
    return json.dumps(response, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
