"""Renders a page as one HTML document that contains its data, arrays, styles and script.

A content security policy allows only the embedded script and styles, by hash, and no network access.
Untrusted text is embedded only as JSON, which the script inserts as text content.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources

from attnlens_viewer.encoding import SMALL_ROW, layer_bytes, to_base64
from attnlens_viewer.page import Page
from attnlens_viewer.page_json import page_json

MAX_PAGE_BYTES = 70 * 10**6

_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="attnlens">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="attnlens"></main>
<noscript>This page draws attention with its own script: allow scripts to see it.</noscript>
<script type="application/json" id="attnlens-data">{data}</script>
{arrays}
<script>{script}</script>
</body>
</html>
"""


def html_of(page: Page, *, small: bool = False, max_bytes: int = MAX_PAGE_BYTES) -> str:
    """Render a page as an HTML document.

    Args:
        page: Page to render.
        small: Keep only the 32 largest weights of each row.
        max_bytes: Maximum size of the attention maps. If all weights exceed it, only the 32 largest of each
            row are kept, and the page displays a notice.

    Raises:
        ValueError: A weight is not between 0 and 1, or the reduced maps exceed `max_bytes`.
    """
    kept = SMALL_ROW if small else None
    reason = "requested" if small else ""
    maps = encoded_maps(page, kept, max_bytes)
    if maps is None and kept is None:
        kept, reason = SMALL_ROW, "size"
        maps = encoded_maps(page, kept, max_bytes)
    if maps is None:
        raise ValueError(
            f"the page exceeds {max_bytes:,} bytes even with only the {SMALL_ROW} largest weights of each "
            "row. Shorten the text or show fewer layers."
        )
    names = {f"maps-{text}-{layer}": content for (text, layer), content in maps.items()}
    return document(page.title, page_json(page, kept=kept, reason=reason), names, assets="page")


def document(title: str, data: dict[str, object], arrays: Mapping[str, bytes], *, assets: str) -> str:
    """Render an HTML document with JSON data and binary arrays by name.

    Args:
        title: Document title.
        data: Data of the page, with JSON types.
        arrays: Content of each element `attnlens-NAME`, which is stored in base64.
        assets: File name of the style and the script, without suffix.
    """
    style, script = asset(f"{assets}.css"), asset(f"{assets}.js")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _DOCUMENT.format(
        policy=policy,
        title=html.escape(title),
        style=style,
        data=_escape_json(data),
        arrays="\n".join(
            f'<script type="text/plain" id="attnlens-{name}">{to_base64(content)}</script>'
            for name, content in arrays.items()
        ),
        script=script,
    )


def encoded_maps(page: Page, kept: int | None, max_bytes: int) -> dict[tuple[int, int], bytes] | None:
    """Compress the maps of each (text index, layer), keeping `kept` weights per row (all if None).

    Return None if the result exceeds `max_bytes` in base64.
    """
    encoded: dict[tuple[int, int], bytes] = {}
    size = 0
    for index, text in enumerate(page.texts):
        for layer, maps in enumerate(text.maps):
            content = layer_bytes(maps, None if kept is None else min(kept, len(text.tokens)))
            size += -(-len(content) // 3) * 4
            if size > max_bytes:
                return None
            encoded[index, layer] = content
    return encoded


@cache
def asset(name: str) -> str:
    """Return the content of a file in `assets`."""
    return (resources.files("attnlens_viewer") / "assets" / name).read_text(encoding="utf-8").strip()


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _escape_json(data: dict[str, object]) -> str:
    """Serialize to JSON without HTML tags, so that `</script>` in a token cannot end the script element."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
