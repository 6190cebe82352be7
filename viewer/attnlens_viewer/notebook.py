"""Embeds a page in a notebook cell, as an iframe or as widget state."""

import html

from attnlens_viewer.document import MAX_PAGE_BYTES, encoded_maps, html_of
from attnlens_viewer.page import Page
from attnlens_viewer.page_json import page_json


def iframe_of(page: Page, *, height_px: int = 900, small: bool = True) -> str:
    """Return HTML for `_repr_html_` that displays the page in a sandboxed iframe.

    Raises:
        ValueError: See `html_of`.
    """
    document = html.escape(html_of(page, small=small), quote=True)
    style = f"width:100%;height:{height_px}px;border:0"
    return (
        f'<iframe srcdoc="{document}" title="{html.escape(page.title, quote=True)}" sandbox="allow-scripts" '
        f'style="{style}"></iframe>'
    )


def widget_state_of(page: Page) -> dict[str, object]:
    """Return the state that `assets/widget.js` reads: `page` and the zlib-compressed `maps` of each layer.

    `widget.js` follows the anywidget module format and is used as `_esm`, with `page.css` as `_css`.

    Raises:
        ValueError: The attention maps exceed the size limit.
    """
    maps = encoded_maps(page, None, MAX_PAGE_BYTES)
    if maps is None:
        raise ValueError(f"the attention maps exceed {MAX_PAGE_BYTES:,} bytes. Shorten the text.")
    return {"page": page_json(page, kept=None, reason=""), "maps": list(maps.values())}
