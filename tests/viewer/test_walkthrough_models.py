"""The walkthrough page computes the attention weights of real graphs from q, k and biases."""

import re
from pathlib import Path

import numpy as np
import pytest

from attnlens_analysis.teach import walkthrough_page
from attnlens_analysis.teach.tokens import Sentence
from attnlens_analysis.teach.values import compute
from attnlens_analysis.teach.walkthrough import TOLERANCE, walkthrough_of
from attnlens_server.text import Tokens, TokenSource
from attnlens_viewer.walkthrough import walkthrough_html
from opened_page import Open, OpenedPage

pytest.importorskip("onnx")  # optional dependency

SENTENCE = "The animal didn't cross the street because it was too tired."
MIXED_IDS = np.arange(3, 16, dtype=np.int64)[None]


def agreement(page: OpenedPage, layer: int) -> float:
    """Return the largest difference between weights of a layer, as the page displays it."""
    page.tab.get_by_label("Layer", exact=True).select_option(str(layer))
    match = re.search(rf"the weights of layer {layer} differ by at most (\S+)\.$", page.text(".fact"))
    assert match is not None
    return float(match[1])


def test_minilm_weights_agree_with_the_graph(open_file: Open, minilm_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "minilm.html"
    path.write_text(walkthrough_page(minilm_bundle, SENTENCE, token="it", layer=3, head=1), encoding="utf-8")
    assert path.stat().st_size <= 1e6
    page = open_file(f"{path.as_uri()}#step=6")
    assert page.mark_ms() > 0
    assert "Largest weight: 0.677 on “animal”." in page.text(".fact")
    assert max(agreement(page, layer) for layer in range(6)) <= TOLERANCE
    page.press("3 Products")
    assert page.text(".facts") == "all-MiniLM-L6-v2 · 16 tokens · 6 layers"


def mixed_page(tmp_path: Path) -> str:
    """Return the page of an encoder with rotary embeddings, relative biases, ALiBi and Longformer layers."""
    pytest.importorskip("torch")
    from attnlens_analysis.structure import read_proto, structure_of  # noqa: PLC0415
    from attnlens_analysis.teach.graph import find_layer  # noqa: PLC0415
    from attnlens_export.graph.write import write_embedded  # noqa: PLC0415
    from mixed_mechanisms import traced_mixed  # noqa: PLC0415 - imports torch

    graph = traced_mixed("pre")[1]
    path = tmp_path / "graph.onnx"
    write_embedded(path, graph.proto, graph.weights)
    structure = structure_of(read_proto(path))
    names = {layer: find_layer(structure, layer, f"attentions.{layer}") for layer in range(3)}
    layers, _ = compute(path, names, "last_hidden_state", MIXED_IDS)
    size = MIXED_IDS.shape[1]
    words = [f"w{index}" for index in range(size)]
    spans = [(3 * index, 3 * index + 2) for index in range(size)]
    sources = [TokenSource.TEXT] * size
    tokens = Tokens(MIXED_IDS[0].tolist(), words, sources, spans, spans, list(range(size)))
    sentence = Sentence(" ".join(words), MIXED_IDS, tokens)
    return walkthrough_html(walkthrough_of("mixed", sentence, layers, {3: "longformer"}))


def test_rotary_embeddings_biases_and_windows_agree_with_the_graph(open_file: Open, tmp_path: Path) -> None:
    path = tmp_path / "mixed.html"
    path.write_text(mixed_page(tmp_path), encoding="utf-8")
    page = open_file(f"{path.as_uri()}#step=6&layer=0&head=0&token=6")
    assert max(agreement(page, layer) for layer in range(3)) <= TOLERANCE
    assert page.text(".about").endswith("layer 3 (longformer).")
    page.press("5 Mask")
    assert (
        page.text(".fact") == "6 of 13 scores of “w6” are \N{MINUS SIGN}∞."
    )  # a window of 3 tokens on both sides
    page.tab.get_by_label("Layer", exact=True).select_option("0")
    page.press("2 q, k, v")
    assert "rotary position embeddings" in page.text(".content")
