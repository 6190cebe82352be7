"""HTML representation of results in notebooks: escaped text, colored by score."""

import html.parser
import re
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from attnlens_client import AttentionQuery, Client, Comparison, Explanation
from attnlens_client.notebook import view
from served import ServerProcess

HOSTILE = "</span><img src=x onerror=alert(1)> &lt;b&gt; \" ' <script>alert(2)</script>"
ALLOWED = {"div", "span"}


class Read(html.parser.HTMLParser):
    """Parser of HTML elements, attributes and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open = 0
        self.shown = ""
        self.feed(source)
        self.close()
        assert self.open == 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open += 1

    def handle_endtag(self, tag: str) -> None:
        assert tag in ALLOWED
        self.open -= 1

    def handle_data(self, data: str) -> None:
        self.shown += data


@pytest.fixture
def client(minilm_server: ServerProcess) -> Iterator[Client]:
    with Client(minilm_server.address) as client:
        yield client


def chips(source: str) -> list[dict[str, str | None]]:
    read = Read(source)
    assert {tag for tag, _ in read.elements} <= ALLOWED
    assert {name for _, attributes in read.elements for name in attributes} <= {"style", "title", "dir"}
    return [attributes for tag, attributes in read.elements if tag == "span"]


def opacity(chip: dict[str, str | None]) -> float:
    """Return the opacity of the background, negative if the color is vermilion."""
    found = re.search(r"background:rgba\((0,114,178|213,94,0),([0-9.]+)\)", chip["style"] or "")
    assert found is not None
    return float(found[2]) * (1 if found[1].startswith("0,") else -1)


def test_explanation_is_colored_by_its_scores(client: Client) -> None:
    [text] = client.explain(["A man is playing a guitar."], to="A man is eating.", level="words")
    found = chips(text._repr_html_())
    values = text.values.astype(float)
    assert [chip["title"] for chip in found] == [
        f"{label}: {value:+.4f}" for label, value in zip(text.labels, values, strict=True)
    ]
    wanted = 0.6 * values / np.abs(values).max()
    assert np.allclose([opacity(chip) for chip in found], wanted, atol=6e-4)
    assert values.min() < 0 < values.max()
    assert f"target {text.target_value:.4f}" in Read(text._repr_html_()).shown


def test_undefined_scores_have_no_color(client: Client) -> None:
    [text] = client.explain(["It rained."], methods="leave_one_out")
    first, *_, last = chips(text._repr_html_())
    assert first["title"] == "[CLS]: undefined"
    assert "background:none" in (first["style"] or "")
    assert "background:none" in (last["style"] or "")


def test_comparison_shows_both_texts(client: Client) -> None:
    pair = client.compare("A man plays.", "Someone plays.", matrix="output")
    shown = Read(pair._repr_html_()).shown
    assert f"cosine {pair.similarity:.4f}" in shown
    assert "largest pairs: plays - plays +" in shown
    assert len(chips(pair._repr_html_())) == len(pair.a.tokens) + len(pair.b.tokens)


def test_tokens_are_shown_with_the_available_results(client: Client) -> None:
    [text] = client.encode(["It rained."], attention=AttentionQuery(layers=[0]))
    assert [chip["title"] for chip in chips(text._repr_html_())][:2] == [
        "0: id 101, special",
        "1: id 2009, text",
    ]
    assert "last_hidden_state float32 (5, 384)" in Read(text._repr_html_()).shown


def hostile_explanation(text: Explanation) -> Explanation:
    tokens = tuple(replace(token, text=HOSTILE) for token in text.tokens)
    return replace(text, tokens=tokens, model=HOSTILE)


def test_hostile_text_is_escaped(client: Client) -> None:
    [text] = client.explain(["It rained."])
    [encoded] = client.encode(["It rained."])
    hostile = hostile_explanation(text)
    tokens = tuple(replace(token, text=HOSTILE, source=HOSTILE) for token in encoded.tokens)
    matrix = np.ones((5, 5), np.float32)
    for shown in (
        hostile,
        Comparison(hostile, hostile, 1.0, matrix),
        replace(encoded, tokens=tokens, model=HOSTILE),
    ):
        source = shown._repr_html_()
        assert len(chips(source)) >= 5
        assert "<script" not in source
        assert "<img" not in source
        assert HOSTILE in Read(source).shown


def test_long_text_is_truncated(client: Client) -> None:
    [text] = client.explain(["It rained."])
    tokens = text.tokens * 1000
    scores = replace(text.scores[0], values=np.zeros(len(tokens), np.float32))
    long = replace(text, tokens=tokens, scores=(scores,))
    assert len(chips(long._repr_html_())) == 2000
    assert "and 3000 more" in Read(long._repr_html_()).shown


def test_widget_without_anywidget_names_the_extra(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "attnlens_viewer.widget", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(ImportError, match=r"widgets require anywidget .*'\.\[notebook\]'.* in a checkout"):
        view(client, "It rained.")
