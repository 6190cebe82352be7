"""The page as a server shows it: a form, and what it fetches.

The reply to a form holds what a file holds, in JSON: the page and its maps. Text from outside is JSON alone,
and the script shows it as text content.
"""

import html
import json
from dataclasses import asdict, dataclass

from attnlens_viewer.document import asset, encoded_maps
from attnlens_viewer.encoding import SMALL_ROW, to_base64
from attnlens_viewer.page import Page
from attnlens_viewer.page_json import page_json

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of every reply: no script and no address but the server's own."""

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
<noscript>This page draws attention maps with its own script: allow scripts to see it.</noscript>
</body>
</html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """The facts about a model that the start page shows."""

    name: str
    num_layers: int
    num_heads: int
    max_tokens: int
    can_explain: bool


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A file that a server sends as it is."""

    content_type: str
    content: bytes


def live_files(model: LiveModel) -> dict[str, LiveFile]:
    """Return the files of the page by their paths."""
    shell = _SHELL.format(
        title=html.escape(f"{model.name} - attnlens"), model=html.escape(json.dumps(asdict(model)))
    )
    return {
        "/": LiveFile("text/html; charset=utf-8", shell.encode()),
        "/live.js": LiveFile("text/javascript; charset=utf-8", asset("live.js").encode()),
        "/page.css": LiveFile("text/css; charset=utf-8", asset("page.css").encode()),
    }


def live_reply(page: Page, max_bytes: int) -> bytes:
    """Return what the script fetches: `page`, and `maps` of each text and layer in base64.

    Where all weights would need more than `max_bytes`, the 32 largest of each row are kept, and the page says
    so.

    Raises:
        ValueError: the maps are over the limit even so, or a weight is not between 0 and 1.
    """
    kept, reason = None, ""
    maps = encoded_maps(page, None, max_bytes)
    if maps is None:
        kept, reason = SMALL_ROW, "size"
        maps = encoded_maps(page, kept, max_bytes)
    if maps is None:
        raise ValueError(
            f"the maps would have more than {max_bytes:,} bytes with the {SMALL_ROW} largest weights of each "
            "row: cut the text"
        )
    reply = {
        "page": page_json(page, kept=kept, reason=reason),
        "maps": [to_base64(content) for content in maps.values()],
    }
    return json.dumps(reply, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
