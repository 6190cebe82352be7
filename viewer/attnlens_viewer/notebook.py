"""A page in a cell of a notebook: as a frame, or as the state of a widget."""

import html

from attnlens_viewer.document import MAX_PAGE_BYTES, encoded_maps, html_of
from attnlens_viewer.page import Page
from attnlens_viewer.page_json import page_json


def iframe_of(page: Page, *, height_px: int = 900, small: bool = True) -> str:
    """Return HTML for `_repr_html_`: the document in a frame, which shares nothing with the notebook.

    Raises:
        ValueError: as `html_of`.
    """
    document = html.escape(html_of(page, small=small), quote=True)
    style = f"width:100%;height:{height_px}px;border:0"
    return (
        f'<iframe srcdoc="{document}" title="{html.escape(page.title, quote=True)}" sandbox="allow-scripts" '
        f'style="{style}"></iframe>'
    )


def widget_state_of(page: Page) -> dict[str, object]:
    """Return what `assets/widget.js` reads from its model: `page`, and `maps` as bytes, text by text.

    `widget.js` is a module with `export default { render }`, as anywidget and marimo take it for `_esm`;
    `page.css` is its `_css`. The bytes are zlib's form of each layer.

    Raises:
        ValueError: the maps are over the limit of a page.
    """
    maps = encoded_maps(page, None, MAX_PAGE_BYTES)
    if maps is None:
        raise ValueError(f"the maps have more than {MAX_PAGE_BYTES:,} bytes: cut the text")
    return {"page": page_json(page, kept=None, reason=""), "maps": list(maps.values())}
