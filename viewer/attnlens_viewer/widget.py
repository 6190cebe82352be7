"""Notebook widget for Jupyter, VS Code, Colab and marimo. Requires the extra `notebook` (anywidget).

The attention maps are transferred as binary data instead of base64.
"""

import anywidget
import traitlets

from attnlens_viewer.document import asset
from attnlens_viewer.notebook import widget_state_of
from attnlens_viewer.page import Page


class PageWidget(anywidget.AnyWidget):
    """A page in a notebook cell.

    Attributes:
        page: Page without its attention maps, as JSON types.
        maps: Zlib-compressed maps of each layer of each text.
    """

    _esm = asset("widget.js")
    _css = asset("page.css")
    page = traitlets.Dict().tag(sync=True)
    maps = traitlets.List(traitlets.Bytes()).tag(sync=True)


def widget_of(page: Page) -> PageWidget:
    """Create a widget for a page.

    Raises:
        ValueError: The attention maps exceed the size limit.
    """
    return PageWidget(**widget_state_of(page))
