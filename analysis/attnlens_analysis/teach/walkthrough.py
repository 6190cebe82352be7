"""Builds the interactive page: q, k and v of all layers and heads for one text.

T tokens, H heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attnlens_analysis.errors import NotTeachableError, TextError
from attnlens_analysis.teach.tokens import Sentence, read_sentence
from attnlens_analysis.teach.values import LayerValues, compute, locate_layers, resolve_index
from attnlens_server.bundle import open_bundle
from attnlens_server.text import TokenSource
from attnlens_viewer.document import MAX_PAGE_BYTES
from attnlens_viewer.initial_view import initial_view
from attnlens_viewer.page import ViewedText, ViewedToken
from attnlens_viewer.tokens import viewed_tokens
from attnlens_viewer.walkthrough import HeadValues, Walkthrough, walkthrough_html

MAX_TOKENS = 64
# Maximum difference between softmax(q·k) and the weights of the graph.
TOLERANCE = 1e-4


def walkthrough_page(
    directory: Path,
    text: str,
    *,
    token: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> str:
    """Compute the attention of a text and return an HTML page that shows it step by step.

    Args:
        directory: Bundle directory.
        text: Text. No prompt is added.
        token: Token that the page opens with: its string, word or index. If None, a token that attends to a
            distant word.
        layer: Layer that the page opens with, possibly negative. If None, it is selected with the head.
        head: Head that the page opens with, possibly negative. If None, a head that attends to distant words.

    Raises:
        AnalysisError: The arguments are invalid, or the attention of the model cannot be decomposed.
        attnlens_server.errors.StartupError: The bundle is invalid.
        ImportError: `onnx` is not installed.
    """
    bundle = open_bundle(directory)
    sentence = read_sentence(bundle, text)
    if len(sentence) > MAX_TOKENS:
        raise TextError(
            f"TEXT has {len(sentence)} tokens, but an interactive page can have up to {MAX_TOKENS}. "
            "Shorten TEXT, or write a lesson on one token with --token and --html."
        )
    requested_layer = resolve_index("layer", layer, bundle.model.num_layers)
    names = locate_layers(bundle, requested_layer)
    hidden = bundle.model.outputs.hidden_state("attention").name
    layers, _ = compute(bundle.graph_path("attention"), names, hidden, sentence.input_ids)
    described = enumerate(bundle.manifest.architecture.layers)
    omitted = {index: each.attention for index, each in described if index not in layers}
    content = walkthrough_of(bundle.model.name, sentence, layers, omitted)
    return walkthrough_html(_with_start(content, sentence, token, requested_layer, head))


def walkthrough_of(
    model_name: str, sentence: Sentence, layers: Mapping[int, LayerValues], omitted: Mapping[int, str]
) -> Walkthrough:
    """Return the content of the page. It opens with a head that attends to distant words.

    Raises:
        NotTeachableError: The weights of a layer are not the softmax of its scores.
        TextError: The page would be too large.
    """
    for layer, values in layers.items():
        difference = float(np.abs(values.weights_with() - values.weights).max())
        if not difference <= TOLERANCE:
            raise NotTeachableError(
                f"attention weights of layer {layer} differ from softmax(q·k) by up to {difference:.1e}, "
                f"more than {TOLERANCE:.0e}: an interactive page needs a bundle in fp32"
            )
    tokens = _viewed_tokens(sentence)
    num_heads = len(next(iter(layers.values())).weights)
    indices = [index for index, values in layers.items() if len(values.weights) == num_heads]
    maps = [np.clip(layers[index].weights, 0, 1) for index in indices]
    view = initial_view(ViewedText(label="TEXT", tokens=tokens, maps=maps))
    content = Walkthrough(
        text=sentence.text,
        model=model_name,
        hidden_size=next(iter(layers.values())).entering.shape[-1],
        tokens=tokens,
        ids=[int(each) for each in sentence.input_ids[0]],
        layers={index: _head_values(values) for index, values in layers.items()},
        omitted=omitted,
        start=(indices[view.layer], view.head, view.row),
    )
    if content.array_bytes > MAX_PAGE_BYTES:
        fitting = len(sentence) * MAX_PAGE_BYTES // content.array_bytes
        raise TextError(
            f"the page would have {content.array_bytes / 1e6:.0f} MB, more than the maximum of "
            f"{MAX_PAGE_BYTES / 1e6:.0f} MB. Shorten TEXT to {fitting} tokens."
        )
    return content


def _with_start(
    content: Walkthrough, sentence: Sentence, token: str | None, layer: int | None, head: int | None
) -> Walkthrough:
    """Replace the token, layer and head that the page opens with by those requested."""
    first_layer, first_head, first_row = content.start
    selected = first_layer if layer is None else layer
    num_heads = len(content.layers[selected].query)
    requested_head = resolve_index("head", head, num_heads)
    if requested_head is None:
        requested_head = min(first_head, num_heads - 1)
    row = first_row if token is None else sentence.find(token)
    return replace(content, start=(selected, requested_head, row))


def _head_values(values: LayerValues) -> HeadValues:
    has_terms = values.has_biases or not values.allowed.all()
    biases = values.biases if values.has_biases else 0.0
    return HeadValues(
        query=values.query,
        key=values.key,
        value=values.value,
        weights=values.weights,
        scale=values.scale,
        bias=np.where(values.allowed, biases, -np.inf) if has_terms else None,
        is_rotated=values.is_rotated,
    )


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    source: str
    char_start: int
    char_end: int
    word_index: int | None

    @property
    def is_special(self) -> bool:
        return self.source == TokenSource.SPECIAL.name


def _viewed_tokens(sentence: Sentence) -> list[ViewedToken]:
    tokens = sentence.tokens
    rows = zip(sentence.labels, tokens.sources, tokens.chars, tokens.words, strict=True)
    described = [_Token(label, source.name, *chars, word) for label, source, chars, word in rows]
    return viewed_tokens(described, {TokenSource.TEXT.name: sentence.text})
