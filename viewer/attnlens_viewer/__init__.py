"""Makes one HTML file of texts, their attention maps and scores of their tokens. It needs no network.

`page` says what a page holds, `encoding` makes the maps small, `document` writes the file, `notebook` shows
it in a cell. The script and the style in `assets` are bundled from `viewer/src` by `make viewer`.
"""

from attnlens_viewer.document import MAX_PAGE_BYTES, html_of
from attnlens_viewer.notebook import iframe_of, widget_state_of
from attnlens_viewer.page import Contrast, HeadLabels, Page, PairMatrix, Scores, ViewedText, ViewedToken
from attnlens_viewer.tokens import viewed_tokens

__all__ = [
    "MAX_PAGE_BYTES",
    "Contrast",
    "HeadLabels",
    "Page",
    "PairMatrix",
    "Scores",
    "ViewedText",
    "ViewedToken",
    "html_of",
    "iframe_of",
    "viewed_tokens",
    "widget_state_of",
]
