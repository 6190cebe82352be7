"""Builds a self-contained HTML page with the attention maps and token scores of one or two texts.

`page` defines the content of a page, `encoding` compresses the attention maps, `document` renders the HTML
file and `notebook` embeds it in a notebook cell. `walkthrough` builds a page that computes attention step by
step. `make viewer` bundles the scripts and styles in `assets`
from `viewer/src`.
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
