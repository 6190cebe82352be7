"""The viewer as a notebook widget: `view(client, "some text")`. Requires the extra `notebook`.

In marimo, wrap the widget: `mo.ui.anywidget(view(client, "some text"))`.
"""

from typing import TYPE_CHECKING

from attnlens_client.arguments import PairMatrixName
from attnlens_client.client import BlockingMethods
from attnlens_client.pages import view_page

if TYPE_CHECKING:
    from attnlens_viewer.widget import PageWidget


def view(
    client: BlockingMethods,
    text: str,
    other: str | None = None,
    *,
    rather_than: str | None = None,
    matrix: PairMatrixName = "output",
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate: bool = False,
    model: str = "",
) -> "PageWidget":
    """Return the page of one or two texts as a widget. For arguments see `pages.view_page`.

    Raises:
        ImportError: anywidget is not installed.
        ValueError, AttnlensError: See `pages.view_page`.
    """
    try:
        from attnlens_viewer.widget import widget_of  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"widgets require anywidget ({error}): run `pip install '.[notebook]'` in a checkout of attnlens",
            name="anywidget",
        ) from error
    page = view_page(
        client,
        text,
        other,
        rather_than=rather_than,
        matrix=matrix,
        prompt_name=prompt_name,
        prompt=prompt,
        truncate=truncate,
        model=model,
    )
    return widget_of(page)
