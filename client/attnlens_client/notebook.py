"""The viewer in a cell of a notebook: `view(client, "some text")`. Needs the extra `notebook`.

In marimo, wrap what `view` returns: `mo.ui.anywidget(view(client, "some text"))`.
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
    """Return the page of one text or two as a widget. The arguments are those of `pages.view_page`.

    Raises:
        ImportError: anywidget is not installed.
        ValueError, AttnlensError: as `pages.view_page`.
    """
    try:
        from attnlens_viewer.widget import widget_of  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(
            f"a widget needs anywidget ({error}): in a checkout of attnlens, pip install '.[notebook]'",
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
