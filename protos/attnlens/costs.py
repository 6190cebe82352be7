"""Estimates the cost of explanations and reductions, in computed tokens.

A computed token is one token in one run of the embeddings graph. The estimate excludes the first run of each
text, which every method needs. Servers compare it with a limit before they run a request, and clients use it
to split requests.

Dimension names: L layers, K selected heads, h is 1 if heads are averaged and K otherwise, T tokens of a text,
E embedding size.
"""

import math

from attnlens.reductions.choices import AttentionReduction, SqrtUint8, Statistics, Threshold, TopK

# Converts NumPy time to model work: floating-point operations of the model per nanosecond, with one thread.
_FLOPS_PER_NS = 60
_SWEEP_TOKENS = 2  # a token in the contributions graph costs as much as two in the embeddings graph

# Nanoseconds per attention weight that a step processes, for the slowest of several measured shapes.
_COPY_NS = 1.5
_HEAD_MEAN_NS = 1.0
_WORDS_NS = 8.0
_DROP_NS = 11.0
_LAYER_MEAN_NS = 1.0
_ROLLOUT_NS = 10.0
_ROLLOUT_NS_PER_TOKEN = 0.02
_ROW_MEAN_NS = 1.5
_TOP_K_NS = 40.0
_THRESHOLD_NS = 35.0
_RECEIVED_NS = 1.5
_ENTROPY_NS = 4.5
_SQRT_UINT8_NS = 3.5


def flops_per_token(hidden_size: int, intermediate_size: int, num_layers: int) -> int:
    """Return the floating-point operations of the linear layers for one token."""
    return num_layers * (8 * hidden_size**2 + 4 * hidden_size * intermediate_size)


def masked_runs_cost(num_tokens: int, num_runs: int) -> int:
    """Return the cost of running a text `num_runs` times with one token masked in each run."""
    return num_tokens * num_runs


def sweeps_cost(num_tokens: int, num_runs: int) -> int:
    """Return the cost of running a text through the contributions graph `num_runs` times."""
    return _SWEEP_TOKENS * num_tokens * num_runs


def input_matrix_cost(num_tokens: tuple[int, int], dimensions: int) -> int:
    """Return the cost of PAIR_MATRIX_INPUT for two texts.

    The contributions graph runs E times for the shorter text, and for the longer text once per token of the
    shorter one and once for its baseline.
    """
    shorter, longer = sorted(num_tokens)
    return sweeps_cost(shorter, dimensions) + sweeps_cost(longer, shorter + 1)


def reduction_cost(
    reduction: AttentionReduction,
    num_layers: int,
    num_heads: int,
    num_tokens: int,
    *,
    is_mean_of_heads: bool,
    token_flops: int,
) -> int:
    """Return the cost of a reduction, rounded up.

    Args:
        reduction: The reduction. T is an upper bound for its words.
        num_layers: L.
        num_heads: K.
        num_tokens: T.
        is_mean_of_heads: Whether heads are averaged.
        token_flops: See `flops_per_token`.
    """
    is_mean = is_mean_of_heads or reduction.layers == "rollout"
    # Words and special tokens are reduced before the mean over heads.
    layer_ns = num_heads * (_COPY_NS + _HEAD_MEAN_NS * is_mean)
    layer_ns += num_heads * _WORDS_NS * (reduction.level == "words")
    layer_ns += num_heads * _DROP_NS * (reduction.special_tokens == "drop")
    num_maps = 1 if is_mean else num_heads  # h
    if reduction.layers == "mean":
        layer_ns += num_maps * _LAYER_MEAN_NS
    elif reduction.layers == "rollout":
        layer_ns += _ROLLOUT_NS + _ROLLOUT_NS_PER_TOKEN * num_tokens
    num_results = 1 if reduction.joins_layers else num_layers
    result_ns = num_maps * _ROW_MEAN_NS * reduction.mean_over_rows
    num_tokens = max(1, num_tokens)
    num_rows = 1 if reduction.mean_over_rows else len(reduction.rows) or num_tokens
    result_ns += num_maps * _form_ns(reduction) * num_rows / num_tokens
    total_ns = num_tokens**2 * (num_layers * layer_ns + num_results * result_ns)
    return math.ceil(total_ns * _FLOPS_PER_NS / max(1, token_flops))


def _form_ns(reduction: AttentionReduction) -> float:
    match reduction.form:
        case Statistics() as statistics:
            return _RECEIVED_NS * statistics.received + _ENTROPY_NS * statistics.entropy
        case TopK():
            return _TOP_K_NS
        case Threshold():
            return _THRESHOLD_NS
        case SqrtUint8():
            return _SQRT_UINT8_NS
    return 0.0
