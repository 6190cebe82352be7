"""Notebook widget for Jupyter, VS Code, Colab and marimo. Requires the extra `notebook` (anywidget).

The attention maps are transferred as binary data instead of base64.
"""

from typing import Any

import anywidget
import traitlets

from attnlens_viewer.document import asset
from attnlens_viewer.notebook import iframe_of, widget_state_of
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

    def __init__(self, shown: Page) -> None:
        super().__init__(**widget_state_of(shown))
        self._shown = shown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown.title!r})"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: ANN401
        """Add HTML for programs without widgets, such as nbconvert."""
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, "text/html": iframe_of(self._shown)}, metadata


def widget_of(page: Page) -> PageWidget:
    """Create a widget for a page.

    Raises:
        ValueError: The attention maps exceed the size limit.
    """
    return PageWidget(page)
