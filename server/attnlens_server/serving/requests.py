"""Typed requests of all methods, and the plans that validation derives from them.

Requests are independent of the protocol and not yet validated. Field names match the messages of
`attnlens.v1`, whose .proto files document them. Violations refer to them. In plans, the defaults of the model
are filled in and names are resolved to graph outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from attnlens.classifiers import ScoreActivation
from attnlens.embedding_types import EmbeddingType
from attnlens.explanations import ExplainLevel, ExplainMethod, Float64Array, PairMatrix
from attnlens.patterns import BlockTable
from attnlens.pooling import FloatArray, Pooling
from attnlens.reductions import AttentionReduction
from attnlens_server.bundle import Kind, Layout, Output, OutputRole, RowSum
from attnlens_server.engine import HeadSelection, RequestedOutput, RequestedReduction
from attnlens_server.errors import FieldViolation
from attnlens_server.text import Input

FLOAT32: "np.dtype[np.float32]" = np.dtype(np.float32)
FLOAT16: "np.dtype[np.float16]" = np.dtype(np.float16)
DataType = np.dtype[np.float32] | np.dtype[np.float16]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text that precedes each input. Exactly one of `name` and `text` is set."""

    name: str | None = None
    text: str | None = None


class AttentionView(IntEnum):
    """Form of an attention output. The values are those of `attnlens.v1.AttentionView`."""

    FULL = 1
    HEAD_MEAN = 2
    DENSE = 3


@dataclass(frozen=True, slots=True)
class AttentionQuery:
    """Selection of attention outputs. Empty `layers` or `heads` select all."""

    role: OutputRole = OutputRole.ATTENTION_WEIGHTS
    layers: Sequence[int] = ()
    heads: Sequence[int] = ()
    view: AttentionView = AttentionView.FULL
    reduction: AttentionReduction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Base class of all requests."""

    model: str = ""
    model_version: str = ""
    inputs: Sequence[Input]
    prompt: Prompt | None = None
    violations: Sequence[FieldViolation] = ()
    """Violations found during parsing, such as unknown enum values, reported with those of the validation."""

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Inputs in fields other than `inputs`."""
        return ()

    @property
    def size(self) -> int:
        """Number of characters and token ids, which validation and tokenization time depends on."""
        return len(self.inputs) + sum([each.size for each in (*self.inputs, *self.other_inputs)])

    @property
    def memory_bytes(self) -> int:
        """Memory of the texts (4 bytes per character if one of them is an emoji) and token ids."""
        return sum([each.memory_bytes for each in (*self.inputs, *self.other_inputs)])


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(Request):
    """Request for one vector per text. `dimensions` 0 means all. `ranges` are not yet validated."""

    truncate: bool | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int = 0
    data_type: DataType = FLOAT32
    embedding_type: EmbeddingType = EmbeddingType.FLOAT
    ranges: FloatArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest(Request):
    """Request for token vectors, attention or both."""

    truncate: bool | None = None
    last_hidden_state: bool = False
    attention: Sequence[AttentionQuery] = ()
    data_type: DataType = FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest(Request):
    """Request for the tokens of each text."""


class LongDocuments(IntEnum):
    """Handling of documents that are too long. The values are those of `attnlens.v1.LongDocuments`."""

    TRUNCATE = 1
    SPLIT = 2
    REJECT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(Request):
    """Request for the relevance of documents to a query.

    Attributes:
        query: Query. `inputs` are its documents, as texts. If None, `inputs` are pairs.
        top_n: Number of results to return. 0 means all.
        long_documents: What to do with documents that are too long.
        max_tokens_per_document: Maximum number of tokens of a document. 0 means as many as fit.
        activation: Function from logits to scores. None means that of the classifier.
        explanation_level: Unit of the contributions to each returned logit. None means no explanations.
    """

    query: str | None = None
    top_n: int = 0
    long_documents: LongDocuments = LongDocuments.TRUNCATE
    max_tokens_per_document: int = 0
    activation: ScoreActivation | None = None
    explanation_level: ExplainLevel | None = None

    @property
    def other_inputs(self) -> Sequence[Input]:
        """The query."""
        return () if self.query is None else (Input(text=self.query),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest(Request):
    """Request for the logits of each text. `activation` None means that of the classifier."""

    truncate: bool | None = None
    activation: ScoreActivation | None = None


@dataclass(frozen=True, slots=True)
class Label:
    """Label of a classifier, by index or by name. If both are None, it was not specified."""

    index: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class LabelTarget:
    """Label whose logit is explained, None for that of a reranker, minus the logit of `rather_than`."""

    label: Label | None = None
    rather_than: Label | None = None


@dataclass(frozen=True, slots=True)
class ExplanationTarget:
    """Direction that contributions refer to. If nothing is set, each text's own embedding or the logit.

    Attributes:
        own_embedding: Whether each text's own embedding was set.
        label: Label of a classifier.
        direction: Vector, whose shape is not yet validated.
        to: Text whose embedding is the direction.
        contrast: Two texts. The direction is the difference between their embeddings, first minus second.
    """

    own_embedding: bool = False
    label: LabelTarget | None = None
    direction: FloatArray | None = None
    to: Input | None = None
    contrast: tuple[Input, Input] | None = None

    @property
    def inputs(self) -> dict[str, Input]:
        """Texts by field path."""
        if self.contrast is not None:
            return {"contrast.to": self.contrast[0], "contrast.rather_than": self.contrast[1]}
        return {} if self.to is None else {"to": self.to}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationRequest(Request):
    """Base class of ExplainRequest and CompareRequest."""

    truncate: bool | None = None
    pooling: Pooling | None = None
    dimensions: int = 0
    methods: Sequence[ExplainMethod] = ()
    level: ExplainLevel = ExplainLevel.TOKENS
    head_contributions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRequest(ExplanationRequest):
    """Request for the contribution of each token to its text's embedding or to a similarity."""

    target: ExplanationTarget = ExplanationTarget()
    target_prompt: Prompt | None = None

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Texts of the target."""
        return tuple(self.target.inputs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest(ExplanationRequest):
    """Request for the contribution of each token to the similarity of two texts.

    `inputs` and `prompt` belong to the first text of each pair, `second_inputs` and `prompt_b` to the second.
    """

    second_inputs: Sequence[Input]
    prompt_b: Prompt | None = None
    matrix: PairMatrix | None = None

    @property
    def other_inputs(self) -> Sequence[Input]:
        """Second text of each pair."""
        return self.second_inputs


@dataclass(frozen=True, slots=True)
class EmbedPlan:
    """Validated EmbedRequest.

    Attributes:
        prompt: Text that precedes each input.
        pooling: Pooling of the token vectors.
        normalize_first: Whether to normalize before components are cut off, as the publisher does.
        dimensions: Number of components to keep.
        normalize: Whether to normalize at the end.
        data_type: Element type of the result, unless it is quantized.
        embedding_type: Quantization of the result.
        ranges: Ranges of the components (2, dimensions), if the quantization needs them.
    """

    prompt: str
    pooling: Pooling
    normalize_first: bool
    dimensions: int
    normalize: bool
    data_type: DataType
    embedding_type: EmbeddingType = EmbeddingType.FLOAT
    ranges: FloatArray | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the result is quantized."""
        return self.embedding_type is not EmbeddingType.FLOAT

    @property
    def row_bytes(self) -> int:
        """Size of an embedding in a response."""
        itemsize = 1 if self.is_quantized else self.data_type.itemsize
        return self.embedding_type.num_columns(self.dimensions) * itemsize


@dataclass(frozen=True, slots=True)
class LogitsPlan:
    """Validated ScoreRequest or ClassifyRequest.

    Attributes:
        prompt: Text that precedes each query or input.
        activation: Function from logits to scores.
        explanation: Plan of the explanations of returned logits, or None.
    """

    prompt: str
    activation: ScoreActivation
    explanation: "ExplanationPlan | None" = None


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """Validated AttentionQuery.

    Attributes:
        index: Position of the query in the request.
        role: Role of the outputs.
        outputs: One output per layer, in the requested order. All have the same number of heads, row sum and
            layout.
        heads: Heads to return or to average, from 0.
        view: Form of the result.
        reduction: Reduction of the weights, or None.
    """

    index: int
    role: OutputRole
    outputs: tuple[Output, ...]
    heads: tuple[int, ...]
    view: AttentionView
    reduction: AttentionReduction | None = None

    @property
    def layout(self) -> Layout:
        """Layout of the arrays that are returned or reduced."""
        return result_layout(self.outputs[0], self.view, is_reduced=self.reduction is not None)

    @property
    def parts(self) -> tuple[tuple[Output, ...], ...]:
        """Outputs of each part of a stream: one layer, or all layers that a reduction joins."""
        if self.reduction is not None and self.reduction.joins_layers:
            return (self.outputs,)
        return tuple((output,) for output in self.outputs)

    @property
    def num_result_heads(self) -> int:
        """Number of maps per layer of the result."""
        return 1 if self.view is AttentionView.HEAD_MEAN else len(self.heads)

    @property
    def row_sum(self) -> RowSum:
        """Row sum of the outputs."""
        return self.outputs[0].row_sum

    def num_values(self, num_tokens: int) -> int:
        """Return the number of values per layer for a text of this length."""
        if self.layout is Layout.DENSE:
            return self.num_result_heads * num_tokens**2
        return self.outputs[0].num_values(num_tokens, self.num_result_heads)

    def pattern_bytes(self, num_tokens: int) -> int:
        """Return the size of the block table per layer for a text of this length, in bytes."""
        table = self.outputs[0].pattern
        if self.layout is not Layout.BLOCKS or not isinstance(table, BlockTable):
            return 0
        return 4 * len(self.heads) * table.num_slots * -(-num_tokens // table.block_size)

    def engine_output(self, output: Output) -> RequestedOutput:
        """Return the engine's form of one of the outputs."""
        is_mean, is_dense = self.view is AttentionView.HEAD_MEAN, self.layout is Layout.DENSE
        selection = HeadSelection(self.heads, is_mean=is_mean, is_dense=is_dense)
        return RequestedOutput(output.name, output.layout, selection, output.pattern)

    def engine_reduction(self, outputs: Sequence[Output]) -> RequestedReduction | None:
        """Return the engine's form of the reduction of some outputs, or None if there is no reduction."""
        if self.reduction is None:
            return None
        is_mean = self.view is AttentionView.HEAD_MEAN
        # Words and special tokens are reduced per head, before the mean over heads.
        selection = HeadSelection(self.heads, is_mean=is_mean and not self.reduction.has_units, is_dense=True)
        layers = tuple(
            RequestedOutput(output.name, output.layout, selection, output.pattern)
            for output in sorted(outputs, key=lambda output: output.layer or 0)
        )
        return RequestedReduction(layers, self.reduction, is_mean_of_heads=is_mean)


def result_layout(output: Output, view: AttentionView, *, is_reduced: bool = False) -> Layout:
    """Return the layout in which a view of an output is returned or reduced."""
    if is_reduced and output.pattern is not None:
        return Layout.DENSE
    is_mean_of_blocks = view is AttentionView.HEAD_MEAN and output.layout is Layout.BLOCKS
    is_dense = output.pattern is not None and (view is AttentionView.DENSE or is_mean_of_blocks)
    return Layout.DENSE if is_dense else output.layout


Part = tuple[QueryPlan, tuple[Output, ...]]
"""A query and the outputs of one part of a stream: one layer, or all layers that a reduction joins."""


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Validated EncodeRequest.

    Attributes:
        prompt: Text that precedes each input.
        hidden_state: Output with the token vectors, or None if they are not requested.
        queries: Attention queries.
        data_type: Element type of the result.
    """

    prompt: str
    hidden_state: Output | None
    queries: tuple[QueryPlan, ...]
    data_type: DataType

    @property
    def kind(self) -> Kind:
        """Graph that has all outputs."""
        return "attention" if self.queries else "embeddings"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Attention parts of each text in a stream, in order."""
        return tuple((query, outputs) for query in self.queries for outputs in query.parts)

    @property
    def row_selections(self) -> Mapping[int, AttentionReduction]:
        """Reductions that select rows, by the index of their query."""
        reductions = {query.index: query.reduction for query in self.queries}
        return {index: reduction for index, reduction in reductions.items() if reduction and reduction.rows}

    @property
    def needs_units(self) -> bool:
        """Whether reductions need the words and special tokens of texts."""
        return any(query.reduction is not None and query.reduction.needs_text for query in self.queries)

    def outputs(
        self, parts: Sequence[Part], *, with_hidden_state: bool = True
    ) -> tuple[RequestedOutput, ...]:
        """Return the engine outputs that are returned unreduced, the token vectors first."""
        hidden = self.hidden_state if with_hidden_state else None
        return ((RequestedOutput(hidden.name, hidden.layout),) if hidden else ()) + tuple(
            query.engine_output(output)
            for query, outputs in parts
            if query.reduction is None
            for output in outputs
        )

    def reduced_outputs(self, parts: Sequence[Part]) -> tuple[RequestedReduction, ...]:
        """Return the engine outputs that are reduced."""
        reductions = (query.engine_reduction(outputs) for query, outputs in parts)
        return tuple(reduction for reduction in reductions if reduction is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationPlan:
    """Validated ExplainRequest or CompareRequest.

    Attributes:
        prompt: Text that precedes each of `inputs`.
        other_prompt: Text that precedes each text of the target, or the second text of each pair.
        truncate: Whether to truncate long texts. If None, the default of the server.
        pooling: Pooling of the token vectors.
        dimensions: Number of components E of an embedding.
        methods: Methods, each once.
        level: Whether scores are per token or per word.
        head_contributions: Whether to return contributions of heads.
        direction: Direction (E,), or None if it is the embedding of a text.
        matrix: Matrix of token pairs of a comparison, or None.
        is_logit: Whether p are the logits of a classifier. The target is then d . p, not d . p / |p|.
        is_dot: Whether a comparison is about the dot product of embeddings. The target is then d . p, where d
            is the embedding of the other text.
    """

    prompt: str
    other_prompt: str
    truncate: bool | None
    pooling: Pooling
    dimensions: int
    methods: tuple[ExplainMethod, ...]
    level: ExplainLevel
    head_contributions: bool
    direction: Float64Array | None = None
    matrix: PairMatrix | None = None
    is_logit: bool = False
    is_dot: bool = False

    @property
    def keeps_length(self) -> bool:
        """Whether the target is d . p, not d . p / |p|."""
        return self.is_logit or self.is_dot

    @property
    def needs_contributions(self) -> bool:
        """Whether to run the contributions graph."""
        return ExplainMethod.CONTRIBUTIONS in self.methods

    @property
    def needs_token_vectors(self) -> bool:
        """Whether the vectors of all tokens are needed."""
        return ExplainMethod.OUTPUT_SHARE in self.methods or self.matrix is PairMatrix.OUTPUT

    @property
    def needs_input_matrix(self) -> bool:
        """Whether to run the contributions graph once per component for each pair."""
        return self.matrix is PairMatrix.INPUT

    @property
    def needs_norms(self) -> bool:
        """Whether to run the contributions graph once per component for each text."""
        return ExplainMethod.CONTRIBUTION_NORM in self.methods

    @property
    def needs_masked_runs(self) -> bool:
        """Whether to run the model without each token."""
        return ExplainMethod.LEAVE_ONE_OUT in self.methods or self.matrix is PairMatrix.INTERACTION

    @property
    def needs_further_runs(self) -> bool:
        """Whether texts need more than one run of a graph."""
        return self.needs_masked_runs or self.needs_input_matrix or self.needs_norms
