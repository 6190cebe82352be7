"""Writes the file: the data, the maps, the style and the script in one HTML document.

A content security policy allows this script and this style, by their hashes, and nothing else: no network, no
other script. Text from outside is in JSON alone, and the script shows it as text content.
"""

import base64
import hashlib
import html
import json
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
<noscript>This page draws attention maps with its own script: allow scripts to see it.</noscript>
<script type="application/json" id="attnlens-data">{data}</script>
{maps}
<script>{script}</script>
</body>
</html>
"""


def html_of(page: Page, *, small: bool = False, max_bytes: int = MAX_PAGE_BYTES) -> str:
    """Return the whole document.

    Args:
        page: what it shows.
        small: keep the 32 largest weights of each row only.
        max_bytes: where all weights would need more, the 32 largest of each row are kept, and the page says
            so.

    Raises:
        ValueError: a weight is not between 0 and 1, or the document is over `max_bytes` even so.
    """
    kept = SMALL_ROW if small else None
    reason = "asked" if small else ""
    maps = encoded_maps(page, kept, max_bytes)
    if maps is None and kept is None:
        kept, reason = SMALL_ROW, "size"
        maps = encoded_maps(page, kept, max_bytes)
    if maps is None:
        raise ValueError(
            f"the page would have more than {max_bytes:,} bytes with the {SMALL_ROW} largest weights of each "
            "row: cut the text, or show fewer layers"
        )
    style, script = asset("page.css"), asset("page.js")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _DOCUMENT.format(
        policy=policy,
        title=html.escape(page.title),
        style=style,
        data=_escaped(page_json(page, kept=kept, reason=reason)),
        maps="\n".join(
            f'<script type="text/plain" id="attnlens-maps-{text}-{layer}">{to_base64(content)}</script>'
            for (text, layer), content in maps.items()
        ),
        script=script,
    )


def encoded_maps(page: Page, kept: int | None, max_bytes: int) -> dict[tuple[int, int], bytes] | None:
    """Return the maps by number of text and layer. None: their base64 would have more than `max_bytes`."""
    encoded: dict[tuple[int, int], bytes] = {}
    size = 0
    for number, text in enumerate(page.texts):
        for layer, maps in enumerate(text.maps):
            content = layer_bytes(maps, None if kept is None else min(kept, len(text.tokens)))
            size += -(-len(content) // 3) * 4
            if size > max_bytes:
                return None
            encoded[number, layer] = content
    return encoded


@cache
def asset(name: str) -> str:
    """Return a file of `assets`."""
    return (resources.files("attnlens_viewer") / "assets" / name).read_text(encoding="utf-8").strip()


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _escaped(data: dict[str, object]) -> str:
    """Return JSON that holds no tag: `</script>` in a token must not end the script."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
