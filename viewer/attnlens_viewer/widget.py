"""The page as a widget, in Jupyter, VS Code, Colab and marimo. Needs anywidget: the extra `notebook`.

The maps go to the browser as bytes, without base64. The script is that of the file.
"""

import anywidget
import traitlets

from attnlens_viewer.document import asset
from attnlens_viewer.notebook import widget_state_of
from attnlens_viewer.page import Page


class PageWidget(anywidget.AnyWidget):
    """A page in a cell.

    Attributes:
        page: everything but the maps, as JSON's types.
        maps: zlib's form of each layer, text by text.
    """

    _esm = asset("widget.js")
    _css = asset("page.css")
    page = traitlets.Dict().tag(sync=True)
    maps = traitlets.List(traitlets.Bytes()).tag(sync=True)


def widget_of(page: Page) -> PageWidget:
    """Return a widget that shows a page.

    Raises:
        ValueError: the maps are over the limit of a page.
    """
    return PageWidget(**widget_state_of(page))
