"""Renders a page on which a reader follows attention step by step, from q, k and v to the output of a head.

Shapes: T tokens, H heads, K query and key size, V value size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from attnlens_viewer.document import document
from attnlens_viewer.page import Array, ViewedToken
from attnlens_viewer.page_json import token_json

VERSION = 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadValues:
    """Values of all heads of a layer.

    Attributes:
        query: (H, T, K).
        key: (H, T, K).
        value: (H, T, V).
        weights: (H, T, T) attention weights of the model. The page compares its own weights with them.
        scale: Factor of q·k.
        bias: (H, T, T) terms added to the scaled products, -inf at masked positions. None if there are none.
        is_rotated: Whether rotary embeddings have been applied to query and key.
    """

    query: Array
    key: Array
    value: Array
    weights: Array
    scale: float
    bias: Array | None = None
    is_rotated: bool = False

    @property
    def arrays(self) -> list[Array]:
        """Arrays in the order in which the page reads them."""
        arrays = [self.query, self.key, self.value, self.weights]
        return arrays if self.bias is None else [*arrays, self.bias]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Walkthrough:
    """Content of the page.

    Attributes:
        text: Original text.
        model: Model name.
        hidden_size: Size of the vectors that enter a layer.
        tokens: The T tokens of the text.
        ids: Vocabulary id of each token.
        layers: Values by layer index.
        omitted: Mechanism of each layer that is not a softmax of q·k, by layer index.
        start: Layer index, head index and token index that the page opens with.
    """

    text: str
    model: str
    hidden_size: int
    tokens: Sequence[ViewedToken]
    ids: Sequence[int]
    layers: Mapping[int, HeadValues]
    start: tuple[int, int, int]
    omitted: Mapping[int, str] = field(default_factory=dict)

    @property
    def array_bytes(self) -> int:
        """Size of all arrays in the document, in base64."""
        return sum(4 * array.size * 4 // 3 for values in self.layers.values() for array in values.arrays)


def walkthrough_html(content: Walkthrough) -> str:
    """Render the page as an HTML document. Arrays are stored as float32."""
    layer, head, token = content.start
    data: dict[str, object] = {
        "version": VERSION,
        "text": content.text,
        "model": content.model,
        "hiddenSize": content.hidden_size,
        "tokens": [token_json(token) for token in content.tokens],
        "ids": list(content.ids),
        "layers": [_layer_json(index, values) for index, values in content.layers.items()],
        "omitted": [{"layer": index, "mechanism": name} for index, name in content.omitted.items()],
        "start": {"layer": layer, "head": head, "token": token},
    }
    arrays = {
        f"layer-{index}": b"".join(array.astype("<f4").tobytes() for array in values.arrays)
        for index, values in content.layers.items()
    }
    return document(f"Attention step by step: {content.text}", data, arrays, assets="walkthrough")


def _layer_json(index: int, values: HeadValues) -> dict[str, object]:
    return {
        "index": index,
        "heads": values.query.shape[0],
        "keySize": values.query.shape[-1],
        "valueSize": values.value.shape[-1],
        "scale": values.scale,
        "isRotated": values.is_rotated,
        "hasBias": values.bias is not None and bool(np.any(values.bias[np.isfinite(values.bias)])),
        "hasTerms": values.bias is not None,
    }
