"""Content and limits of the interactive page."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnlens_analysis.errors import NotTeachableError, TextError, UnknownHeadError, UnknownTokenError
from attnlens_analysis.teach import trace_head, walkthrough, walkthrough_page
from attnlens_analysis.teach.walkthrough import walkthrough_of

pytest.importorskip("onnx")  # optional dependency

SENTENCE = "The animal didn't cross the street because it was too tired."


def data_of(document: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(document.split('id="attnlens-data">')[1].partition("</script>")[0])
    return content


def test_page_contains_all_layers_and_opens_at_the_requested_token(minilm_bundle: Path) -> None:
    data = data_of(walkthrough_page(minilm_bundle, SENTENCE, token="it", layer=-3, head=-11))
    assert data["start"] == {"layer": 3, "head": 1, "token": 10}
    assert (data["model"], data["hiddenSize"], data["omitted"]) == ("all-MiniLM-L6-v2", 384, [])
    assert [layer["index"] for layer in data["layers"]] == list(range(6))
    layer = data["layers"][5]
    assert (layer["heads"], layer["keySize"], layer["valueSize"]) == (12, 32, 32)
    assert layer["scale"] == pytest.approx(32**-0.5)
    assert {layer[name] for name in ("hasTerms", "hasBias", "isRotated")} == {False}
    assert data["tokens"][10] == {"text": "it", "word": 9} | data["tokens"][10]
    assert (data["ids"][0], data["tokens"][0]["special"], data["tokens"][1]["shown"]) == (101, True, "The")


def test_page_opens_with_a_token_of_the_text_by_default(minilm_bundle: Path) -> None:
    start = data_of(walkthrough_page(minilm_bundle, SENTENCE))["start"]
    assert 1 <= start["token"] <= 14


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"text": "word " * 63}, TextError, "65 tokens, but an interactive page can have up to 64. Shorten"),
        ({"token": "dog"}, UnknownTokenError, "no token or word 'dog'"),
        ({"layer": 6}, UnknownHeadError, "layer 6 does not exist"),
        ({"head": 12}, UnknownHeadError, "head 12 does not exist"),
    ],
)
def test_invalid_arguments_are_rejected(
    minilm_bundle: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        walkthrough_page(minilm_bundle, **({"text": SENTENCE} | change))


def test_longest_text_is_accepted(minilm_bundle: Path) -> None:
    document = walkthrough_page(minilm_bundle, "word " * 62)
    assert len(data_of(document)["tokens"]) == 64
    assert len(document) < 5e6


def test_page_over_the_size_limit_is_rejected(minilm_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walkthrough, "MAX_PAGE_BYTES", 300_000)
    with pytest.raises(TextError, match=r"the page would have 1 MB, .* Shorten TEXT to 6 tokens"):
        walkthrough_page(minilm_bundle, SENTENCE)


def test_weights_that_are_not_the_softmax_of_the_scores_are_rejected(minilm_bundle: Path) -> None:
    trace = trace_head(minilm_bundle, SENTENCE, "it")
    values = trace.layers[2]
    layers = {2: replace(values, weights=values.weights + 2e-4)}
    with pytest.raises(NotTeachableError, match=r"layer 2 differ from softmax\(q·k\) by up to 2.0e-04"):
        walkthrough_of("model", trace.sentence, layers, {})
