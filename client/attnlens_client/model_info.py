"""What a server tells of a model. Names that a newer server may send stand as `unknown (NUMBER)`."""

from collections.abc import Mapping
from dataclasses import dataclass

from attnlens_client.coloured_text import printable


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """The attention of one layer.

    Attributes:
        attention: the mechanism, for instance `softmax` or `disentangled`.
        num_heads: H.
        num_key_value_heads: the heads that keys and values have.
        head_size: the width of a head.
        window_radius: Maximum distance between a token and one that it attends to. 0 if unlimited.
    """

    attention: str
    num_heads: int
    num_key_value_heads: int
    head_size: int
    window_radius: int


@dataclass(frozen=True, slots=True)
class OutputInfo:
    """What `encode` can return.

    Attributes:
        role: `last_hidden_state`, or what an `AttentionQuery` may ask for.
        layer: the layer that it belongs to, from 0. None: it belongs to none.
        layout: `dense`: a number for each head and pair of tokens; `per_token`: a row for each token; `band`,
            `blocks`: numbers for some pairs of tokens, see `Attention`.
        num_heads: 0 where it has none.
        row_sum: what a row sums to: `one`, `gate`, `unbounded`. `unspecified`: nothing is said.
    """

    role: str
    layer: int | None
    layout: str
    num_heads: int
    row_sum: str


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense layer between the pooling and the embedding, with its activation."""

    in_features: int
    out_features: int
    bias: bool
    activation: str
    normalize_input: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server, 0 where it names none. The client splits requests to stay within them.

    Attributes:
        max_inputs_per_request: the most texts of a request.
        max_text_bytes: the most bytes of UTF-8 in a text, a prompt included.
        max_concurrent_inputs: the most texts that wait or run at a time, over all requests.
        max_batch_tokens: the most tokens that run in one batch, padding included.
        max_response_bytes: the largest response message.
        max_request_text_bytes: the most bytes of UTF-8 in all texts of a request.
        max_request_bytes: the largest request message.
        max_attention_queries: the most queries of the attention in a request.
        max_computed_tokens: Maximum compute cost of a request beyond running each text once, for
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


@dataclass(frozen=True, slots=True)
class Gate:
    """A limit of the parity check and what was found.

    Attributes:
        graph: the id of the graph.
        role: which of its outputs.
        kind: `max_abs_error`, `min_cosine`, `mean_cosine`, `max_fp16_value` or `max_batch_difference`.
        limit, value: the limit and the measured value.
        text_kind: the kind of text that it is about. Empty: all.
    """

    graph: str
    role: str
    kind: str
    limit: float
    value: float
    text_kind: str


@dataclass(frozen=True, slots=True)
class ParityFigure:
    """The worst errors of one role of one graph against the PyTorch encoder."""

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


@dataclass(frozen=True, slots=True)
class Parity:
    """The outcome of the exporter's parity check over `num_cases` input shapes.

    Attributes:
        long_context: Errors on longer inputs. None if the grid reached the longest input.
    """

    passed: bool
    num_cases: int
    gates: tuple[Gate, ...]
    figures: tuple[ParityFigure, ...]
    long_context: LongContext | None = None


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """How the graphs compare with PyTorch in one engine, as `attnlens check --engine` measured it.

    Attributes:
        engine, version: the package that ran them.
        precision: of embeddings; all else is in fp32.
        device: where it ran.
        processor: its own name.
        passed: whether every gate held.
        num_cases, num_texts: how many input shapes and real texts were measured.
        gates: what had to hold, and what was found.
        figures: the worst errors.
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


@dataclass(frozen=True, slots=True)
class Faithfulness:
    """How well the scores of a method rank the tokens of a text, measured when the model was exported.

    Attributes:
        method: The method. Empty if `control` was ranked.
        rank_correlation: Mean over texts of Spearman's rank correlation with the effect of leaving out each
            token.
        num_texts: Number of texts measured.
        interval_low, interval_high: The 95 % bootstrap confidence interval of `rank_correlation`. None for a
            bundle of an earlier version.
        control: A ranking that explains nothing, for comparison: `random numbers`, `length of the token`.
            Empty for a method.
    """

    method: str
    rank_correlation: float
    num_texts: int
    interval_low: float | None = None
    interval_high: float | None = None
    control: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class ModelInfo:
    """A model and the server that runs it.

    Attributes:
        name: what requests may ask for.
        version: which bundle of that name: the SHA-256 of its manifest. Two with the same version give the
            same results.
        state: `ready`; `degraded`: no attention; `loading`, `unloading`: nothing.
        source: where the weights came from.
        source_revision: the commit of the hub repository that `source` names. Empty: not known.
        hidden_size: the width of a token vector.
        num_heads: of each layer; where layers differ, the most that one has.
        layers: the attention of each layer, in order.
        outputs: what `encode` can return.
        embedding_size: the width of what `embed` returns unless told.
        pooling: how `embed` makes one vector of those of the tokens.
        dense: the layers that pooled vectors go through.
        normalize: whether embeddings are scaled to length 1 at the end.
        exclude_prompt: whether the tokens of a prompt are left out of the pooling.
        prompts: what may be put before a text, by name.
        default_prompt_name: the prompt that is used unless told; empty: none.
        supports_text_pairs: whether a text may be a pair.
        max_tokens: the longest input, special tokens included.
        execution_providers: those of ONNX Runtime, the preferred one first; empty with another engine.
        engine: what runs the model: `onnxruntime` or `openvino`. Vectors of different engines may differ in
            their last digits, in bf16 by more. Empty: the server is older and does not say it.
        device: where the engine runs, in its own words, for instance `CPU`.
        engine_check: how this engine compares with PyTorch in `precision`. None: not measured, or `parity`
            says it.
        precision: `fp32`, `fp16`, `int8` or `bf16`: of embeddings and of token vectors without attention.
        versions: by package name.
        explain_methods: what `explain` and `compare` can be asked for; empty: nothing.
        pair_matrices: which matrices `compare` can be asked for.
        faithfulness: How well methods rank tokens. Empty if not measured.
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

    @property
    def max_dimensions(self) -> int:
        """How many components `embed` can return; the publisher may keep fewer."""
        return self.dense[-1].out_features if self.dense else self.hidden_size

    def __repr__(self) -> str:
        kind = f"{self.state}, {printable(self.family)}"
        sizes = f"{self.num_layers} layers, {self.num_heads} heads, {self.hidden_size} wide"
        return f"ModelInfo({self.name!r}, version={self.version[:12]!r}, {kind}, {sizes})"
