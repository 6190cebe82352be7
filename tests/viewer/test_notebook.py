"""Notebook output: the iframe and the widget state."""

import html
import json
from pathlib import Path

import numpy as np

from attnlens_viewer import iframe_of, widget_state_of
from attnlens_viewer.document import asset
from opened_page import Open
from viewer_pages import TOKENS, full_page, maps_of, plain_page


def test_iframe_contains_the_whole_page(open_file: Open, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    frame = iframe_of(plain_page())
    path.write_text(f'<div class="attnlens" data-ready="true"></div>{frame}', encoding="utf-8")
    page = open_file(path)
    inner = page.tab.frame_locator("iframe")
    inner.locator(".text .chip").nth(3).click()
    assert inner.locator(".text .sum").inner_text().startswith("animal attends to")
    assert html.escape(plain_page().title, quote=True) in frame


def test_widget_draws_maps_from_binary_data(open_file: Open, tmp_path: Path) -> None:
    state = widget_state_of(full_page())
    maps = [list(part) for part in state["maps"]]  # type: ignore[attr-defined]
    program = f"""
      const maps = {maps}.map((part) => new DataView(Uint8Array.from(part).buffer));
      const state = {{ page: {json.dumps(state["page"])}, maps }};
      const module = URL.createObjectURL(new Blob([SOURCE], {{ type: "text/javascript" }}));
      const widget = (await import(module)).default;
      widget.render({{ model: {{ get: (name) => state[name] }}, el: document.getElementById("cell") }});
    """
    path = tmp_path / "widget.html"
    script = program.replace("SOURCE", json.dumps(asset("widget.js")).replace("<", "\\u003c"))
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><style>{asset("page.css")}</style><div id="cell"></div>'
        f'<script type="module">{script}</script>',
        encoding="utf-8",
    )
    page = open_file(path)
    page.press("Tokens")
    page.choose_head(2, 2)
    roots = np.rint(255 * np.sqrt(maps_of(len(TOKENS))[2, 2]))
    assert len(np.unique(page.pixels(".map canvas.cells").reshape(-1, 3), axis=0)) == len(np.unique(roots))
