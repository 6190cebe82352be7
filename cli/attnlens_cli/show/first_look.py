"""Output of `attnlens try`: tokens, embedding or labels, contributions, attention, similarities or a ranking.

Shapes: N texts, D components of an embedding, W words, k largest weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnlens_cli.printable import counted, printable
from attnlens_cli.show.attention_map import AttentionMap
from attnlens_cli.show.explanation import print_scores
from attnlens_client import EncodedText, Explanation, ModelInfo, RankedDocument

_MAX_COMPONENTS = 5
_MAX_WORDS = 12
_MAX_SCORES = 6
_MAX_TARGETS = 2


@dataclass(frozen=True, slots=True)
class Look:
    """Results of a server for one text.

    Attributes:
        text: The text.
        encoded: Its tokens, and if `attention` is set the largest weights of each word, (1, 1, W, k).
        vector: Embedding, float32 (D,). None for a classifier.
        attention: None if the model has no weights between tokens.
        explanation: None if the bundle has no contribution graph. For a classifier, that of the first label.
        labels: Labels of a classifier with their scores, in descending order.
    """

    text: str
    encoded: EncodedText
    vector: npt.NDArray[np.float32] | None
    attention: AttentionMap | None
    explanation: Explanation | None
    labels: Sequence[tuple[str, float]] = ()


def print_model(console: Console, model: ModelInfo) -> None:
    """Print one line about the model."""
    sizes = f"{counted(model.num_layers, 'layer')}, {counted(model.num_heads, 'head')}"
    line = f"{model.family}, {sizes}, up to {counted(model.max_tokens, 'token')}, {model.precision}"
    console.print(Text.assemble((printable(model.name), "bold"), f": {line}"))


def print_look(console: Console, look: Look) -> None:
    """Print the results of one text."""
    console.print()
    console.print(Text(printable(look.text), "bold"))
    encoded = look.encoded
    count = counted(encoded.num_tokens, "token")
    if encoded.truncated:
        count = f"the first {count} of {encoded.num_tokens_total}"
    facts = Table.grid(padding=(0, 2))
    facts.add_row("tokens", Text.assemble((f"{count}: ", "dim"), _tokens(encoded)))
    if look.vector is not None:
        facts.add_row("embedding", _embedding(look.vector))
    if look.labels:
        shown = [f"{printable(label)} {score:.4f}" for label, score in look.labels[:_MAX_WORDS]]
        facts.add_row("labels", ", ".join(shown) + (", …" if len(look.labels) > _MAX_WORDS else ""))
    console.print(facts)
    if look.explanation is None and look.vector is not None:
        console.print(Text("This bundle has no contribution graph.", "dim"))
    elif look.explanation is not None:
        explained = "the logit" if look.vector is None else "the embedding"
        if look.labels:
            explained += f" of {printable(look.labels[0][0])}"
        heading = f"Contributions of words, punctuation and special tokens to {explained}:"
        console.print(Text(heading, "dim"))
        texts = {"text": look.text}
        print_scores(console, look.explanation, texts=texts, top=_MAX_SCORES, verify=False)
    if look.attention is None:
        console.print(Text("This model has no attention weights between words.", "dim"))
    else:
        _print_strongest(console, look.attention)


def print_ranking(console: Console, query: str, ranked: Sequence[RankedDocument]) -> None:
    """Print the relevance of documents to a query."""
    console.print()
    console.print(Text.assemble(("relevance to ", "bold"), (printable(query), "bold")))
    table = _table()
    for result in ranked:
        table.add_row(f"{result.score:.4f}", printable(result.document))
    console.print(table)


def print_similarities(console: Console, looks: Sequence[Look], function: str) -> None:
    """Print the similarity of each pair of texts, which have embeddings. `function` is `cosine` or `dot`."""
    vectors = np.stack([look.vector for look in looks if look.vector is not None]).astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors if function == "dot" else vectors / np.where(lengths == 0, 1, lengths)
    similarities = units @ units.T  # (N, N)
    console.print()
    console.print(Text("dot product" if function == "dot" else "cosine similarity", "bold"))
    table = _table()
    for _ in looks:
        table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for row, look in enumerate(looks):
        shown = [f"{similarities[row, column]:.4f}" for column in range(row + 1)]
        table.add_row(*shown, *[""] * (len(looks) - len(shown)), printable(look.text))
    console.print(table)


def _tokens(encoded: EncodedText) -> Text:
    shown = [
        (printable(token.text), "dim" if token.is_special else "")
        for token in encoded.tokens[: 4 * _MAX_WORDS]
    ]
    ellipsis = [("…", "dim")] if len(shown) < len(encoded.tokens) else []
    return Text(" ").join(Text(text, style) for text, style in [*shown, *ellipsis])


def _embedding(vector: npt.NDArray[np.float32]) -> Text:
    length = np.linalg.norm(vector.astype(np.float64))
    first = " ".join(f"{value:+.4f}" for value in vector[:_MAX_COMPONENTS])
    ellipsis = " …" if len(vector) > _MAX_COMPONENTS else ""
    size = f"{counted(len(vector), 'component')}, length {length:.4f}: "
    return Text.assemble((size, "dim"), first, (ellipsis, "dim"))


def _print_strongest(console: Console, attention: AttentionMap) -> None:
    """Print the other words that each word attends to most."""
    top, labels = attention.result.attention[0].top_k, attention.labels
    if len(labels) < 2:  # noqa: PLR2004 - no other word
        return
    console.print(Text("Largest attention weights of each word, mean of all layers and heads:", "dim"))
    table = _table()
    for row, label in list(enumerate(labels))[:_MAX_WORDS]:
        largest = zip(top.indices[0, 0, row].tolist(), top.values[0, 0, row].tolist(), strict=True)
        targets = [f"{labels[column]} {value:.2f}" for column, value in largest if column != row]
        table.add_row(label, f"→ {', '.join(targets[:_MAX_TARGETS])}")
    console.print(table)
    if len(labels) > _MAX_WORDS:
        console.print(Text(f"and {counted(len(labels) - _MAX_WORDS, 'more word')}", "dim"))


def _table() -> Table:
    return Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
