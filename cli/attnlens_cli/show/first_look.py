"""What `attnlens try` prints of each text: tokens, vector, what made it, and its strongest attention.

Letters: N texts, D width of an embedding, W words, k largest weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnlens_cli.show.attention.map import AttentionMap
from attnlens_cli.show.explanations.bars import print_scores
from attnlens_cli.show.printable import counted, printable
from attnlens_client import EncodedText, Explanation, ModelInfo

_COMPONENTS = 5
_MOST_WORDS = 12
_MOST_SCORES = 6
_MOST_OTHERS = 2


@dataclass(frozen=True, slots=True)
class Look:
    """What a server said of a text.

    Attributes:
        text: as it was given.
        encoded: its tokens, and where `attention` is set the largest weights of each word, (1, 1, W, k).
        vector: float32, (D,).
        attention: None where the model has no weights between tokens.
        explanation: None where the bundle has no contributions.
    """

    text: str
    encoded: EncodedText
    vector: npt.NDArray[np.float32]
    attention: AttentionMap | None
    explanation: Explanation | None


def print_model(console: Console, model: ModelInfo) -> None:
    """Print one line about the model."""
    sizes = f"{counted(model.num_layers, 'layer')}, {counted(model.num_heads, 'head')}"
    line = f"{model.family}, {sizes}, up to {counted(model.max_tokens, 'token')}, {model.precision}"
    console.print(Text.assemble((printable(model.name), "bold"), f": {line}"))


def print_look(console: Console, look: Look) -> None:
    """Print what there is of one text."""
    console.print()
    console.print(Text(printable(look.text), "bold"))
    encoded = look.encoded
    count = counted(encoded.num_tokens, "token")
    if encoded.truncated:
        count = f"the first {count} of {encoded.num_tokens_total}"
    facts = Table.grid(padding=(0, 2))
    facts.add_row("tokens", Text.assemble((f"{count}: ", "dim"), _tokens(encoded)))
    facts.add_row("vector", _vector(look.vector))
    console.print(facts)
    if look.explanation is None:
        console.print(Text("This bundle has no graph of contributions.", "dim"))
    else:
        heading = "Contributions to the vector of words, punctuation and special tokens:"
        console.print(Text(heading, "dim"))
        texts = {"text": look.text}
        print_scores(console, look.explanation, texts=texts, top=_MOST_SCORES, verify=False)
    if look.attention is None:
        console.print(Text("This model has no weights between words to show here.", "dim"))
    else:
        _print_strongest(console, look.attention)


def print_similarities(console: Console, looks: Sequence[Look]) -> None:
    """Print the cosine of each pair of texts."""
    vectors = np.stack([look.vector for look in looks]).astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(lengths == 0, 1, lengths)
    cosines = units @ units.T  # (N, N)
    console.print()
    console.print(Text("cosine similarity", "bold"))
    table = _table()
    for _ in looks:
        table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for row, look in enumerate(looks):
        shown = [f"{cosines[row, column]:.4f}" for column in range(row + 1)]
        table.add_row(*shown, *[""] * (len(looks) - len(shown)), printable(look.text))
    console.print(table)


def _tokens(encoded: EncodedText) -> Text:
    shown = [
        (printable(token.text), "dim" if token.is_special else "")
        for token in encoded.tokens[: 4 * _MOST_WORDS]
    ]
    more = [("…", "dim")] if len(shown) < len(encoded.tokens) else []
    return Text(" ").join(Text(text, style) for text, style in [*shown, *more])


def _vector(vector: npt.NDArray[np.float32]) -> Text:
    length = np.linalg.norm(vector.astype(np.float64))
    first = " ".join(f"{value:+.4f}" for value in vector[:_COMPONENTS])
    more = " …" if len(vector) > _COMPONENTS else ""
    described = f"{counted(len(vector), 'number')}, length {length:.4f}: "
    return Text.assemble((described, "dim"), first, (more, "dim"))


def _print_strongest(console: Console, attention: AttentionMap) -> None:
    """Print for each word the other words that it attends to most."""
    top, labels = attention.result.attention[0].top_k, attention.labels
    if len(labels) < 2:  # noqa: PLR2004 - there is no other word
        return
    console.print(Text("What each word attends to most, the mean of all layers and heads:", "dim"))
    table = _table()
    for row, label in list(enumerate(labels))[:_MOST_WORDS]:
        largest = zip(top.indices[0, 0, row].tolist(), top.values[0, 0, row].tolist(), strict=True)
        others = [f"{labels[place]} {value:.2f}" for place, value in largest if place != row]
        table.add_row(label, f"→ {', '.join(others[:_MOST_OTHERS])}")
    console.print(table)
    if len(labels) > _MOST_WORDS:
        console.print(Text(f"and {counted(len(labels) - _MOST_WORDS, 'more word')}", "dim"))


def _table() -> Table:
    return Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
