"""The notebook viewer: the widget data, and a notebook executed by a real kernel."""

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from ipywidgets.widgets.widget import _remove_buffers

from attnlens_client import Client
from attnlens_client.notebook import view
from attnlens_viewer import iframe_of, widget_state_of
from attnlens_viewer.document import asset
from attnlens_viewer.widget import widget_of
from served import ServerProcess
from viewer_pages import full_page

FIRST, SECOND = "A man is playing a guitar.", "Someone plays an instrument."


@pytest.fixture
def client(minilm_server: ServerProcess) -> Iterator[Client]:
    with Client(minilm_server.address) as client:
        yield client


def test_widget_has_the_page_script_and_the_maps_as_bytes() -> None:
    page = full_page()
    state, paths, buffers = _remove_buffers(widget_of(page).get_state())
    wanted = widget_state_of(page)
    assert (state["_esm"], state["_css"]) == (asset("widget.js"), asset("page.css"))
    assert state["page"] == wanted["page"]
    assert [bytes(part) for part in buffers] == wanted["maps"]
    assert paths == [["maps", place] for place in range(6)]


def test_exported_notebooks_contain_the_page_as_html() -> None:
    page = full_page()
    widget = widget_of(page)
    data, _ = widget._repr_mimebundle_()
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == widget.model_id
    assert data["text/html"] == iframe_of(page)
    assert data["text/plain"] == repr(widget) == f"PageWidget({page.title!r})"


def test_view_contains_the_server_results(client: Client) -> None:
    widget = view(client, FIRST, SECOND, rather_than="A man is eating.")
    assert widget.page["title"] == f"{FIRST} / {SECOND} rather than A man is eating."
    assert widget.page["contrast"]["ratherThan"] == "A man is eating."
    assert widget.page["texts"][0]["scores"][0]["sum"] == pytest.approx(0.667446, abs=1e-5)
    assert len(widget.maps) == 12


@pytest.mark.extended
# The kernel is a separate process. Ignore warnings of its libraries.
@pytest.mark.filterwarnings("ignore")
def test_kernel_displays_results_and_the_widget(minilm_server: ServerProcess) -> None:
    import nbclient  # noqa: PLC0415 - slow import
    import nbformat  # noqa: PLC0415

    setup = f"""
        from attnlens_client import Client
        from attnlens_client.notebook import view
        client = Client({minilm_server.address!r})
        client.explain(['It rained.'])[0]
    """
    cells = (textwrap.dedent(setup), f"view(client, {FIRST!r})", "client.close()")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    [shown] = notebook.cells[0].outputs
    assert "rained: +0.6" in shown["data"]["text/html"]
    [shown] = notebook.cells[1].outputs
    assert FIRST in shown["data"]["text/html"]
    model_id = shown["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    states: dict[str, Any] = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"][
        "state"
    ]
    model = states[model_id]
    assert model["state"]["page"]["title"] == FIRST
    assert len(model["buffers"]) == 6
