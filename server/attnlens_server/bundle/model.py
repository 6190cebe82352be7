"""Model description without protobuf types.

Shapes: B texts, T tokens, D hidden size, H heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from attnlens.chat_template import ChatTemplate
from attnlens.classifiers import ScoreActivation
from attnlens.patterns import Band, BlockTable
from attnlens.pooling import FloatArray, Pooling
from attnlens.similarity import Similarity

Kind = Literal["embeddings", "attention", "contributions", "logits"]
"""Purpose of a graph: token vectors, token vectors and attention of all layers, contributions of tokens to an
embedding, or logits of a classifier. The contributions graph is optional. Only classifiers have logits."""


class OutputRole(IntEnum):
    """Role of an output, with the numbers of `attnlens.v1.OutputRole`, which documents them."""

    LAST_HIDDEN_STATE = 1
    ATTENTION_WEIGHTS = 2
    ATTENTION_COMPOSED = 4
    HEAD_GATES = 5
    LOGITS = 9


class Layout(IntEnum):
    """Layout of an output, with the numbers of `attnlens.v1.OutputLayout`."""

    PER_TOKEN = 1
    """(B, T, D), or (B, T, H)."""
    DENSE = 2
    """(B, H, T, T)."""
    BAND = 3
    """(B, H, T, 2G + 2w + 1), see `attnlens.patterns.Band`."""
    BLOCKS = 4
    """(B, H, T, S * b + 2b), see `attnlens.patterns.Blocks`."""
    PER_TEXT = 5
    """(B, C) logits, or (B, ...) in the contributions graph."""


class RowSum(IntEnum):
    """Sum of each row of an output, with the numbers of `attnlens.v1.RowSum`."""

    UNSPECIFIED = 0
    ONE = 1
    GATE = 2
    UNBOUNDED = 3


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a graph.

    Attributes:
        name: Name in the graph.
        role: Role.
        layout: Layout.
        layer: Layer, or None.
        num_heads: Number of heads H, or 0.
        width: Hidden size D, number of labels C, or 0 for outputs with heads.
        row_sum: Sum of each row.
        pattern: Attention pattern of a band or blocks, else None.
    """

    name: str
    role: OutputRole
    layout: Layout
    layer: int | None = None
    num_heads: int = 0
    width: int = 0
    row_sum: RowSum = RowSum.UNSPECIFIED
    pattern: Band | BlockTable | None = None

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape, with None for dynamic axes."""
        if self.layout is Layout.PER_TEXT:
            return (None, self.width)
        if self.layout is Layout.DENSE:
            return (None, self.num_heads, None, None)
        if self.pattern is not None:
            return (None, self.num_heads, None, self.pattern.width)
        return (None, None, self.num_heads or self.width)

    def num_values(self, num_tokens: int, num_heads: int) -> int:
        """Return the number of values of a text for some of the heads."""
        if self.layout is Layout.DENSE:
            return num_heads * num_tokens**2
        return num_heads * num_tokens * (self.pattern.width if self.pattern else 1)


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of the bundle.

    Attributes:
        path: Path of the ONNX file, relative to the bundle.
        inputs: Names of the inputs.
        outputs: Known outputs.
        unknown_outputs: Names of outputs whose role or layout this version does not know.
    """

    path: str
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    unknown_outputs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ContributionsGraph:
    """The contributions graph. `check` defines its inputs and outputs.

    Attributes:
        path: Path of the ONNX file, relative to the bundle.
        inputs: Names of the inputs.
        embedding_size: Number of components of directions and embeddings.
        heads: Number of layers and of heads per layer.
    """

    path: str
    inputs: tuple[str, ...]
    embedding_size: int
    heads: tuple[int, int]


class ModelOutputs:
    """Outputs of the graphs by role and layer.

    Attributes:
        logits: Output with the logits of a classifier, or None.
    """

    def __init__(self, embeddings: Graph, attention: Graph, logits: Graph | None = None) -> None:
        self.logits = logits.outputs[0] if logits else None
        self._hidden_states: dict[Kind, Output] = {
            "embeddings": _hidden_state(embeddings),
            "attention": _hidden_state(attention),
        }
        self._layers: dict[OutputRole, dict[int, Output]] = {}
        for output in attention.outputs:
            if output.layer is not None:
                self._layers.setdefault(output.role, {})[output.layer] = output

    @property
    def roles(self) -> tuple[OutputRole, ...]:
        """Roles of the outputs of layers."""
        return tuple(self._layers)

    def hidden_state(self, kind: Kind) -> Output:
        """Return the output with the token vectors of a graph."""
        return self._hidden_states[kind]

    def layers(self, role: OutputRole) -> Mapping[int, Output]:
        """Return the outputs of a role by layer. Empty if there are none."""
        return self._layers.get(role, {})


@dataclass(frozen=True, slots=True)
class Classifier:
    """Head of a classifier or reranker.

    Attributes:
        labels: Names of the labels, in the order of the logits. A reranker has one.
        activation: Default function from logits to scores.
    """

    labels: tuple[str, ...]
    activation: ScoreActivation

    @property
    def is_reranker(self) -> bool:
        """Whether the only logit is the relevance of the second text to the first."""
        return len(self.labels) == 1


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """Spearman's rank correlation of a method's scores with leave-one-out, mean over texts."""

    rank_correlation: float
    num_texts: int


def _hidden_state(graph: Graph) -> Output:
    return next(output for output in graph.outputs if output.role is OutputRole.LAST_HIDDEN_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Model of a bundle.

    Attributes:
        name: Model name.
        version: SHA-256 of the manifest in lower-case hexadecimal.
        max_tokens: Maximum input length in tokens, including special tokens, unless configured otherwise.
        max_positions: Maximum input length of the encoder.
        hidden_size: Hidden size D.
        num_layers: Number of layers.
        token_flops: Floating-point operations of the linear layers for one token.
        vocab_size: Size of the vocabulary.
        type_vocab_size: Number of token types. 0 if the graphs have no token types.
        pad_token_id: Token id for padding.
        takes_pairs: Whether an input may be a pair of texts.
        pooling: Default pooling, or that of a classifier's head.
        normalize: Whether embeddings are normalized by default.
        exclude_prompt: Whether pooling excludes the tokens of prompts.
        max_dimensions: Maximum number of components of an embedding, or number of logits.
        embedding_size: Default number of components of an embedding. 0 for a classifier.
        prompts: Texts of prompts by name.
        default_prompt_name: Name of the default prompt, or "".
        graphs: Graphs by kind.
        outputs: Outputs of these graphs.
        contributions: Contributions graph, or None.
        faithfulness: Faithfulness by number of the explanation method. Empty if not measured.
        embedding_ranges: Minimum and maximum of each component (2, embedding_size), or None if not measured.
        classifier: Classification head, or None for an embedding model.
        comparison: Comparison with the publisher's own pipeline and the choice of token ids, in one line.
        chat_template: Chat template into which texts are inserted, or None.
        similarity: Function that compares embeddings, with the numbers of `attnlens.v1.Similarity`.
    """

    name: str
    version: str
    max_tokens: int
    max_positions: int
    hidden_size: int
    num_layers: int
    token_flops: int
    vocab_size: int
    type_vocab_size: int
    pad_token_id: int
    takes_pairs: bool
    pooling: Pooling
    normalize: bool
    exclude_prompt: bool
    max_dimensions: int
    embedding_size: int
    prompts: Mapping[str, str]
    default_prompt_name: str
    graphs: Mapping[Kind, Graph]
    outputs: ModelOutputs
    contributions: ContributionsGraph | None = None
    faithfulness: Mapping[int, Faithfulness] = field(default_factory=dict)
    embedding_ranges: FloatArray | None = None
    classifier: Classifier | None = None
    comparison: str = ""
    chat_template: ChatTemplate | None = None
    similarity: Similarity = Similarity.COSINE

    @property
    def main_kind(self) -> Kind:
        """Graph of the model's main results, which is open while the server runs."""
        return "embeddings" if self.classifier is None else "logits"

    @property
    def pair_bytes(self) -> int:
        """Size of the dense attention of all layers per pair of tokens in fp32."""
        dense = [output for output in self.graphs["attention"].outputs if output.layout is Layout.DENSE]
        return 4 * sum(output.num_heads for output in dense)

    @property
    def row_bytes(self) -> int:
        """Size of the bands and blocks of all layers per token in fp32."""
        patterns = [output for output in self.graphs["attention"].outputs if output.pattern]
        return 4 * sum(output.num_values(1, output.num_heads) for output in patterns)
