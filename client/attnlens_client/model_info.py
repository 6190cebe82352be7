"""Descriptions of models. Enum values of newer servers are named `unknown (NUMBER)`."""

from collections.abc import Mapping
from dataclasses import dataclass

from attnlens.short_repr import short_repr
from attnlens_client.colored_text import printable


@short_repr
@dataclass(frozen=True, slots=True)
class LayerInfo:
    """Attention of one layer.

    Attributes:
        attention: Mechanism, such as `softmax` or `disentangled`.
        num_heads: Number of heads.
        num_key_value_heads: Number of key and value heads.
        head_size: Size of a head.
        window_radius: Maximum distance between tokens that attend to each other. 0 if unlimited.
    """

    attention: str
    num_heads: int
    num_key_value_heads: int
    head_size: int
    window_radius: int


@short_repr
@dataclass(frozen=True, slots=True)
class OutputInfo:
    """Output that `encode` can return.

    Attributes:
        role: `last_hidden_state`, or a role of `AttentionQuery`.
        layer: Layer, or None if the output does not belong to one.
        layout: `dense`, `per_token`, `band` or `blocks`, see `Attention.weights`.
        num_heads: Number of heads. 0 for outputs without heads.
        row_sum: Sum of each row: `one`, `gate`, `unbounded` or `unspecified`.
    """

    role: str
    layer: int | None
    layout: str
    num_heads: int
    row_sum: str


@short_repr
@dataclass(frozen=True, slots=True)
class Dense:
    """Dense layer after the pooling."""

    in_features: int
    out_features: int
    bias: bool
    activation: str
    normalize_input: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server. 0 means unknown. The client splits requests to stay within the limits.

    Attributes:
        max_inputs_per_request: Number of texts per request.
        max_text_bytes: UTF-8 size of a text, including its prompt.
        max_concurrent_inputs: Number of waiting and running texts of all requests.
        max_batch_tokens: Number of tokens per batch, including padding.
        max_response_bytes: Size of a response message.
        max_request_text_bytes: UTF-8 size of all texts of a request.
        max_request_bytes: Size of a request message.
        max_attention_queries: Number of attention queries per request.
        max_computed_tokens: Computation of a request in tokens, beyond one run per text. Used by
            leave-one-out, the matrices `interaction` and `input`, and reductions of attention.
    """

    max_inputs_per_request: int
    max_text_bytes: int
    max_concurrent_inputs: int
    max_batch_tokens: int
    max_response_bytes: int
    max_request_text_bytes: int
    max_request_bytes: int
    max_attention_queries: int
    max_computed_tokens: int


@short_repr
@dataclass(frozen=True, slots=True)
class Gate:
    """A gate of the parity check.

    Attributes:
        graph: Graph id.
        role: Output role.
        kind: `max_abs_error`, `min_cosine`, `mean_cosine`, `max_fp16_value` or `max_batch_difference`.
        limit: Limit.
        value: Measured value.
        text_kind: Kind of text that was measured. Empty for all.
    """

    graph: str
    role: str
    kind: str
    limit: float
    value: float
    text_kind: str


@short_repr
@dataclass(frozen=True, slots=True)
class ParityFigure:
    """Largest errors of one output role of a graph compared with the PyTorch encoder."""

    graph: str
    role: str
    max_abs_error: float
    max_abs_error_float64: float
    torch_max_abs_error_float64: float
    mean_abs_error: float
    p99_abs_error: float
    min_cosine: float
    longest_input_tokens: int
    max_fp16_value: float


@dataclass(frozen=True, slots=True)
class LongContext:
    """Comparison with PyTorch on inputs that are too long for the parity grid.

    Attributes:
        max_tokens: Maximum input length of the encoder.
        hidden_states_tokens: Longest input at which hidden states were compared.
        hidden_states_error: max |ONNX - PyTorch fp32| there. None if the grid reached that length.
        hidden_states_limit: Limit on `hidden_states_error`.
        probe_tokens: Input length of a one-head encoder with the model's position settings. 0 if none was
            compared.
        probe_error: max |ONNX - PyTorch fp32| of that encoder.
        probe_limit: Limit on `probe_error`.
    """

    max_tokens: int
    hidden_states_tokens: int
    hidden_states_error: float | None
    hidden_states_limit: float
    probe_tokens: int
    probe_error: float
    probe_limit: float


@short_repr
@dataclass(frozen=True, slots=True)
class Parity:
    """Result of the export's parity check on `num_cases` input shapes.

    Attributes:
        long_context: Errors on longer inputs. None if the grid reached the longest input.
    """

    passed: bool
    num_cases: int
    gates: tuple[Gate, ...]
    figures: tuple[ParityFigure, ...]
    long_context: LongContext | None = None


@short_repr
@dataclass(frozen=True, slots=True)
class EngineCheck:
    """Comparison of one engine with PyTorch, measured by `attnlens check --engine`.

    Attributes:
        engine: Package name of the engine.
        version: Package version of the engine.
        precision: Precision of embeddings. Other results are in fp32.
        device: Device.
        processor: Name of the processor.
        passed: Whether all gates passed.
        num_cases: Number of input shapes.
        num_texts: Number of texts.
        gates: Limits and measured values.
        figures: Largest errors.
    """

    engine: str
    version: str
    precision: str
    device: str
    processor: str
    passed: bool
    num_cases: int
    num_texts: int
    gates: tuple[Gate, ...]
    figures: tuple[ParityFigure, ...]


@short_repr
@dataclass(frozen=True, slots=True)
class PublisherFigure:
    """Comparison of one kind of result, such as `token ids` or `embeddings (prompt query)`.

    Attributes:
        result: Kind of result, with the prompt if it is not the default.
        num_texts: Number of texts or pairs.
        max_abs_error: Maximum difference. 0 for results that must be equal.
        limit: Limit on `max_abs_error`. 0 for results that must be equal.
    """

    result: str
    num_texts: int
    max_abs_error: float
    limit: float


@short_repr
@dataclass(frozen=True, slots=True)
class PublisherComparison:
    """Comparison of a bundle with the publisher's own pipeline, by the export.

    Attributes:
        library: `sentence-transformers` or `transformers`. Empty if nothing was compared.
        versions: Versions by package name.
        figures: Comparisons in the order of the pipeline.
        not_compared: Results that were not compared, with the reason. If nothing was, the first entry is the
            reason.
        longest_tokens: Number of tokens of the longest text whose vectors were compared.
    """

    library: str
    versions: Mapping[str, str]
    figures: tuple[PublisherFigure, ...]
    not_compared: tuple[str, ...]
    longest_tokens: int


@short_repr
@dataclass(frozen=True, slots=True)
class Faithfulness:
    """Faithfulness of a method's token ranking, measured by the export.

    The target is each text's own embedding, or the highest logit of a classifier.

    Attributes:
        method: Method. Empty for a control.
        rank_correlation: Spearman's rank correlation with leave-one-out, mean over texts.
        num_texts: Number of texts.
        interval_low: Lower end of the 95 % bootstrap confidence interval. None for bundles of earlier
            versions.
        interval_high: Upper end of the interval.
        control: Uninformative ranking for comparison: `random numbers` or `length of the token`. Empty for a
            method.
    """

    method: str
    rank_correlation: float
    num_texts: int
    interval_low: float | None = None
    interval_high: float | None = None
    control: str = ""


@short_repr
@dataclass(frozen=True, slots=True, repr=False)
class ModelInfo:
    """Description of a model and its server.

    Attributes:
        name: Model name.
        version: SHA-256 of the bundle's manifest. Models with the same version return the same results.
        state: `ready`, `degraded` (no attention), `loading` or `unloading`.
        source: Source of the weights.
        source_revision: Commit of the source's hub repository. Empty if unknown.
        hidden_size: Size of a token vector.
        num_heads: Number of heads per layer, the maximum if layers differ.
        layers: Attention of each layer.
        outputs: Outputs that `encode` can return.
        embedding_size: Default size of embeddings. 0 for a classifier, which has none.
        pooling: Default pooling of `embed`, or the pooling of a classifier.
        dense: Dense layers after the pooling. The last one of a classifier returns its logits.
        normalize: Whether embeddings are normalized to length 1 by default.
        exclude_prompt: Whether pooling excludes the tokens of prompts.
        prompts: Texts of prompts by name.
        default_prompt_name: Name of the default prompt. Empty if the model has none.
        supports_text_pairs: Whether a text may be a pair.
        max_tokens: Maximum input length in tokens, including special tokens.
        execution_providers: Execution providers of ONNX Runtime by preference. Empty for other engines.
        engine: Runtime, `onnxruntime` or `openvino`. Embeddings of different engines differ in their last
            digits, in bf16 by more. Empty if an older server does not report it.
        device: Device as named by the engine, such as `CPU`.
        engine_check: Comparison of this engine with PyTorch in `precision`. None if it was not measured, or
            is part of `parity`.
        precision: Precision of embeddings and of token vectors without attention: `fp32`, `fp16`, `int8` or
            `bf16`.
        versions: Versions by package name.
        explain_methods: Methods of `explain` and `compare`. Empty if explanations are not supported.
        pair_matrices: Matrices of `compare`.
        faithfulness: Faithfulness of methods. Empty if not measured.
        labels: Labels of a classifier, in the order of its logits. One for a reranker, none for an embedding
            model.
        activation: Default function from the logits of a classifier to scores: `identity`, `sigmoid` or
            `softmax`. Empty for an embedding model.
        publisher: Comparison with the publisher's own pipeline. None for bundles of earlier versions.
        chat_template: Strings that the server adds before and after each text without a prompt. None for a
            model without a chat template.
        similarity: Function that compares embeddings: `cosine` or `dot`. Empty for a classifier.
        tokenizer_choice: `published` or `transformers` if `tokenizer.json` of the checkpoint and transformers
            give different token ids, and the export chose one. Empty without a choice.
    """

    name: str
    version: str
    state: str
    source: str
    source_revision: str
    weights_license: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    is_causal: bool
    layers: tuple[LayerInfo, ...]
    outputs: tuple[OutputInfo, ...]
    embedding_size: int
    pooling: str
    dense: tuple[Dense, ...]
    normalize: bool
    exclude_prompt: bool
    prompts: Mapping[str, str]
    default_prompt_name: str
    supports_text_pairs: bool
    max_tokens: int
    limits: Limits
    execution_providers: tuple[str, ...]
    precision: str
    parity: Parity
    versions: Mapping[str, str]
    explain_methods: tuple[str, ...]
    pair_matrices: tuple[str, ...]
    faithfulness: tuple[Faithfulness, ...]
    engine: str = ""
    device: str = ""
    engine_check: EngineCheck | None = None
    labels: tuple[str, ...] = ()
    activation: str = ""
    publisher: PublisherComparison | None = None
    chat_template: tuple[str, str] | None = None
    similarity: str = ""
    tokenizer_choice: str = ""

    @property
    def max_dimensions(self) -> int:
        """Maximum number of components of an embedding. The publisher may keep fewer."""
        return self.dense[-1].out_features if self.dense else self.hidden_size

    def __repr__(self) -> str:
        kind = f"{self.state}, {printable(self.family)}"
        sizes = f"{self.num_layers} layers, {self.num_heads} heads, hidden size {self.hidden_size}"
        return f"ModelInfo({self.name!r}, version={self.version[:12]!r}, {kind}, {sizes})"
