"""What the server knows of a model: plain Python, made from the manifest by `manifest`.

Letters: B texts, T tokens of a text, D hidden size, H heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from attnlens.patterns import Band, BlockTable
from attnlens.pooling import Pooling

Kind = Literal["embeddings", "attention", "contributions"]
"""What a graph is there for: token vectors, these and what the attention of each layer gives, or what each
token contributes to an embedding. A bundle may lack the last one."""


class OutputRole(IntEnum):
    """What an output means. The numbers are those of `attnlens.v1.OutputRole`, which says more."""

    LAST_HIDDEN_STATE = 1
    ATTENTION_WEIGHTS = 2
    ATTENTION_COMPOSED = 4
    HEAD_GATES = 5


class Layout(IntEnum):
    """How an output is laid out. The numbers are those of `attnlens.v1.OutputLayout`."""

    PER_TOKEN = 1
    """(B, T, D), or (B, T, H)."""
    DENSE = 2
    """(B, H, T, T)."""
    BAND = 3
    """(B, H, T, 2G + 2w + 1), see `attnlens.patterns.Band`."""
    BLOCKS = 4
    """(B, H, T, S * b + 2b), see `attnlens.patterns.Blocks`."""
    PER_TEXT = 5
    """(B, ...), only in the graph of contributions."""


class RowSum(IntEnum):
    """What the rows of an output sum to. The numbers are those of `attnlens.v1.RowSum`."""

    UNSPECIFIED = 0
    ONE = 1
    GATE = 2
    UNBOUNDED = 3


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a graph.

    Attributes:
        name: the graph's name for it.
        role: what it means.
        layout: where its axes are.
        layer: the layer that it belongs to, from 0; None: it belongs to none.
        num_heads: H; 0 where it has none.
        width: D; 0 where it has heads.
        row_sum: what its rows sum to.
        pattern: between which tokens a band or blocks have weights; None for other layouts.
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
        """Its shape; None is an axis that varies."""
        if self.layout is Layout.DENSE:
            return (None, self.num_heads, None, None)
        if self.pattern is not None:
            return (None, self.num_heads, None, self.pattern.width)
        return (None, None, self.num_heads or self.width)

    def num_values(self, num_tokens: int, num_heads: int) -> int:
        """Return how many numbers a text has in it, of some of the heads."""
        if self.layout is Layout.DENSE:
            return num_heads * num_tokens**2
        return num_heads * num_tokens * (self.pattern.width if self.pattern else 1)


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX file of the bundle.

    Attributes:
        path: relative to the bundle.
        inputs: their names, in order.
        outputs: in order.
        unknown_outputs: the names of those whose role or layout this version does not know.
    """

    path: str
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    unknown_outputs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ContributionsGraph:
    """The ONNX file that says what each token contributes to an embedding. Its names are those of `check`.

    Attributes:
        path: relative to the bundle.
        inputs: their names, in order.
        embedding_size: E, of a direction and of the embedding.
        heads: L and H, of the gates of heads.
    """

    path: str
    inputs: tuple[str, ...]
    embedding_size: int
    heads: tuple[int, int]


class ModelOutputs:
    """Which output of which graph has what a request may ask for."""

    def __init__(self, embeddings: Graph, attention: Graph) -> None:
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
        """What a layer may be asked for."""
        return tuple(self._layers)

    def hidden_state(self, kind: Kind) -> Output:
        """Return the token vectors of the last layer in the graph of a kind."""
        return self._hidden_states[kind]

    def layers(self, role: OutputRole) -> Mapping[int, Output]:
        """Return the outputs of a role by their layer, in the graph with attention; empty: there are none."""
        return self._layers.get(role, {})


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """The mean of Spearman's rank correlation of scores with leave-one-out, over a number of texts."""

    rank_correlation: float
    num_texts: int


def _hidden_state(graph: Graph) -> Output:
    return next(output for output in graph.outputs if output.role is OutputRole.LAST_HIDDEN_STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model of a bundle.

    Attributes:
        name: what requests may call it.
        version: the SHA-256 of its manifest, in lower-case hexadecimal.
        max_tokens: the longest input, special tokens included, where the server's configuration says nothing.
        max_positions: the longest input that the encoder has positions for.
        hidden_size: D.
        num_layers: L.
        token_flops: Floating-point operations of the linear layers for one token.
        vocab_size: ids are 0 to vocab_size - 1.
        type_vocab_size: types of tokens are 0 to type_vocab_size - 1; 0: the graphs take none.
        pad_token_id: fills a batch up.
        takes_pairs: an input may be a pair of texts.
        pooling: how token vectors become one, where a request does not say.
        normalize: embeddings are scaled to length 1, where a request does not say.
        exclude_prompt: the tokens of a prompt don't count in the pooling.
        max_dimensions: components that an embedding has at most.
        embedding_size: those that it has where a request does not say.
        prompts: by name.
        default_prompt_name: of the prompt where a request says nothing; empty: there is none.
        graphs: by what they are there for.
        outputs: what these graphs return.
        contributions: the graph of contributions; None: the bundle has none.
        faithfulness: how well methods of explaining rank tokens, by the method's number; empty: not measured.
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

    @property
    def pair_bytes(self) -> int:
        """What the dense attention of all layers takes for a pair of tokens, in fp32."""
        dense = [output for output in self.graphs["attention"].outputs if output.layout is Layout.DENSE]
        return 4 * sum(output.num_heads for output in dense)

    @property
    def row_bytes(self) -> int:
        """What the bands and blocks of all layers take for a token, in fp32."""
        patterns = [output for output in self.graphs["attention"].outputs if output.pattern]
        return 4 * sum(output.num_values(1, output.num_heads) for output in patterns)
