"""Checklist for self-attention layers: each item runs the layer and reports the number that shows a mistake.

Shape legend: B batch, T tokens, D hidden size, H heads, K head size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from attnlens_model.testing.layer import Layer, LayerCall, LayerCallError, MaskStyle
from attnlens_model.testing.trace import Attention, Joining, Softmax, Trace, centered, visible

_TOLERANCE = 1e-4
"""Maximum difference, relative to the largest output, between results that are equal in exact arithmetic."""

_NO_GRADIENT = 1e-6
"""Maximum gradient, relative to the largest one, that is only rounding."""

_EXACT = 1e-5
"""Maximum absolute difference from a reference, and of row sums between two training runs without dropout."""

# Limits for a newly initialized layer. Xavier initialization gives standard deviations of about 1.
_MAX_SCORE_STD = 5.0
_MAX_OUTPUT_STD = 5.0
_NUM_DROPOUT_RUNS = 200
# Limit on the mean deviation of row sums, in standard errors.
_MAX_Z_SCORE = 6.0
# Minimum share of scores set to 0 that counts as dropout.
_MIN_DROPPED_SHARE = 0.01
_MATRIX_AXES = 2
_NUM_FUSED = 3
_NUM_FEATURES = 128
"""Number of input features whose effect on each head is measured."""

_WEAK = 0.2
_MAX_WEAK_SHARE = 0.35
# A head ignores a feature that has less than a fifth of the largest effect. A head that reads only its slice
# ignores at least half of the features.
_NUM_GRADIENT_TEXTS = 8
_EXCHANGED = "the layer exchanges texts and tokens"


class Status(Enum):
    """Outcome of an item."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Item:
    """Outcome of one item of the checklist.

    Attributes:
        name: Name of the item, e.g. "softmax axis".
        status: Outcome.
        measured: The numbers that the outcome is based on, or the reason why the item was skipped.
        meaning: Consequence of the mistake, if the item failed.
        remedy: How to find and fix the mistake, if the item failed.
    """

    name: str
    status: Status
    measured: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class LayerReport:
    """Outcome of the checklist for one layer."""

    layer: str
    items: tuple[Item, ...]

    @property
    def failures(self) -> tuple[Item, ...]:
        """Failed items."""
        return tuple(item for item in self.items if item.status is Status.FAILED)

    @property
    def passed(self) -> bool:
        """Whether no item failed."""
        return not self.failures

    def raise_if_failed(self) -> None:
        """Raise an AssertionError that lists the failed items, for use in tests."""
        if self.failures:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        width = max(len(item.name) for item in self.items)
        lines = [f"{self.layer}: {len(self.failures)} of {len(self.items)} checks failed"]
        for item in self.items:
            lines.append(f"  {item.status.value:7}  {item.name:{width}}  {item.measured}")
            if item.status is Status.FAILED:
                lines += [f"           {item.meaning}", f"           Fix: {item.remedy}"]
        return "\n".join(lines)


def check_attention(
    layer: nn.Module,
    *,
    hidden_size: int,
    num_heads: int | None = None,
    is_causal: bool = False,
    allowed: Callable[[int], Tensor] | None = None,
    uses_positions: bool = False,
    is_trained: bool = False,
    scale: float | None = None,
    mask_style: MaskStyle | None = None,
    call: LayerCall | None = None,
    reference: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
) -> LayerReport:
    """Run the checklist on a self-attention layer.

    The layer maps hidden states (B, T, D) to an output (B, T, D), optionally followed by attention weights
    (B, T, T) or (B, H, T, T), and may take a padding mask (B, T) by keyword. It is copied, not modified.

    Args:
        layer: The layer. `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` work as they are.
        hidden_size: D.
        num_heads: H. If None, the number of heads is not checked.
        is_causal: Whether no token may attend to later tokens. If False, each must be able to attend to all.
        allowed: Function of T that returns which tokens may attend to which, (T, T) bool, query by key, for
            patterns such as a sliding window. Overrides `is_causal`.
        uses_positions: Whether the layer itself uses token positions, e.g. as a relative bias or a rotation.
        is_trained: Whether the weights are trained. If True, initialization is not checked.
        scale: Expected factor of the scores. Defaults to 1 / sqrt(K).
        mask_style: Meaning of the mask argument. By default, derived from its name: `mask` and
            `attention_mask` are True for tokens, `padding_mask` and `key_padding_mask` for padding.
        call: Function that runs the layer, for other signatures. See `LayerCall`.
        reference: Function that maps hidden states (B, T, D) to the expected output.
        seed: Seed of the random inputs.

    Returns:
        The report. A layer that cannot be called at all has one item.
    """
    torch_state = torch.get_rng_state()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        # The fast path is one fused operator, in which nothing can be observed.
        torch.backends.mha.set_fastpath_enabled(False)
        torch.manual_seed(seed)
        case = _Case(
            layer=Layer(layer, call, mask_style),
            hidden_size=hidden_size,
            num_heads=num_heads,
            is_causal=is_causal,
            allowed=allowed,
            uses_positions=uses_positions,
            is_trained=is_trained,
            scale=scale,
            reference=reference,
        )
        return LayerReport(type(layer).__name__, tuple(case.check()))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.set_rng_state(torch_state)


@dataclass
class _Case:
    layer: Layer
    hidden_size: int
    num_heads: int | None
    is_causal: bool
    allowed: Callable[[int], Tensor] | None
    uses_positions: bool
    is_trained: bool
    scale: float | None
    reference: Callable[[Tensor], Tensor] | None

    def check(self) -> Iterator[Item]:
        """Run all items, or only the first one if the layer cannot be called."""
        self.layer.module.eval()
        self.failed: set[str] = set()
        # A number of tokens that is no other size, so that each axis can be recognized by its size.
        sizes = {self.hidden_size, self.num_heads, self.hidden_size // (self.num_heads or 1)}
        self.num_tokens = next(size for size in (5, 7, 11, 13) if size not in sizes)
        self.states = torch.randn(2, self.num_tokens, self.hidden_size)
        try:
            with torch.no_grad():
                self.output, self.returned = self.layer.run(self.states)
            self.trace = self.layer.trace(self.states)
            self.attention = self.attention_of(self.trace)
        except LayerCallError as error:
            yield self._explain_failure(error)
            return
        self.softmax = self.attention.softmax
        if self.output.shape[:-1] != self.states.shape[:-1]:
            yield from (_check_lengths(self), _check_output_shape(self))
            return
        is_finite = bool(self.output.isfinite().all())
        evaluation = _check_evaluation(self)
        for item in _ITEMS:
            if item is _check_evaluation:
                yield evaluation
            elif not is_finite and item in _NEED_FINITE_RESULTS:
                yield _skipped(_NEED_FINITE_RESULTS[item], "results are NaN or infinite")
            elif evaluation.status is Status.FAILED and item in _NEED_REPRODUCIBLE_RESULTS:
                yield _skipped(_NEED_REPRODUCIBLE_RESULTS[item], "results are random in eval mode")
            else:
                result = item(self)
                self.failed |= {result.name} if result.status is Status.FAILED else set()
                yield result

    def _explain_failure(self, error: LayerCallError) -> Item:
        """Return the item for a layer that cannot be called with T tokens. Many masks have the head size."""
        head_size = self.hidden_size // (self.num_heads or 1)
        sizes = [size for size in (head_size, self.hidden_size) if self._runs(size)]
        if sizes:
            return _failed_lengths(self, self.num_tokens, error, f"T = {sizes[0]} works, ")
        return _failed(
            "call",
            f"input {_shape(self.states)}: {error}",
            "The layer does not run.",
            "Call it with hidden states (B, T, D); pass `call` if its arguments are different.",
        )

    def _runs(self, num_tokens: int) -> bool:
        try:
            with torch.no_grad():
                self.layer.run(torch.randn(2, num_tokens, self.hidden_size))
        except LayerCallError:
            return False
        return True

    @property
    def weights(self) -> Tensor | None:
        """Attention weights: the returned ones, otherwise the output of the softmax."""
        if self.returned is not None:
            return self.returned
        if self.softmax is not None:
            return self.softmax.weights
        return None if self.attention.context is None else self.attention.context.left

    def attention_of(self, trace: Trace) -> Attention:
        """Return the attention in a trace."""
        return trace.attention(has_heads=(self.num_heads or 1) > 1)

    @property
    def visible_pairs(self) -> Tensor:
        """(T, T) bool: whether a head has an unmasked score for a query and a key."""
        scores = torch.empty(0) if self.softmax is None else self.softmax.scores
        return visible(scores).reshape(-1, self.num_tokens, self.num_tokens).any(dim=0)

    @property
    def exchanges_axes(self) -> bool:
        """Whether texts attend to each other, and all softmaxes are over the texts of the batch."""
        num_texts = len(self.states)
        shapes = [softmax.scores.shape[-2:] for softmax in self.trace.softmaxes]
        return "batch independence" in self.failed and set(shapes) == {(num_texts, num_texts)}

    @property
    def num_maps(self) -> int:
        """Number of attention maps of each text, or 0 if no softmax was observed."""
        return 0 if self.softmax is None else self.softmax.weights.numel() // (2 * self.num_tokens**2)

    @property
    def head_size(self) -> int | None:
        """K, the number of components that the product of queries and keys contracts."""
        return None if self.attention.scoring is None else self.attention.scoring.left.shape[-1]

    def change(self, changed: Tensor, keep: Tensor | None = None, before: Tensor | None = None) -> Tensor:
        """Return by how much each component of the output differs for changed hidden states, (B, T, D)."""
        output = self.output if before is None else before
        with torch.no_grad():
            return (self.layer.run(changed, keep)[0] - output).abs()

    def is_zero(self, difference: float) -> bool:
        """Return whether a difference of outputs is only rounding."""
        return difference <= _TOLERANCE * max(1.0, float(self.output.abs().max()))

    def influence(self, keep: Tensor | None = None) -> Tensor:
        """Return the largest gradient of each output token to each input token of each text, (B, T, B, T)."""
        states = self.states.clone().requires_grad_()
        output = self.layer.run(states, keep)[0]
        batch, tokens = output.shape[:2]
        rows = torch.zeros(batch, tokens, batch, tokens)
        for text in range(batch):
            for token in range(tokens):
                # One random direction: gradients of all components would cancel only by accident.
                target = (output[text, token] * torch.randn(output.shape[-1])).sum()
                [gradient] = torch.autograd.grad(target, states, retain_graph=True, allow_unused=True)
                if gradient is not None:
                    rows[text, token] = gradient.abs().amax(dim=-1)
        return rows


def _check_lengths(case: _Case) -> Item:
    sizes = {case.head_size or 1, case.hidden_size // (case.num_heads or 1)}
    lengths = sorted({1, 2, case.num_tokens, *sizes, *(size + 1 for size in sizes), case.hidden_size + 3})
    for length in lengths:
        try:
            with torch.no_grad():
                case.layer.run(torch.randn(2, length, case.hidden_size))
        except LayerCallError as error:
            return _failed_lengths(case, length, error)
    return _passed("input lengths", f"T = {', '.join(map(str, lengths))}")


def _failed_lengths(case: _Case, length: int, error: LayerCallError, works: str = "") -> Item:
    buffers = [
        f"`{name}` {_shape(buffer)}"
        for name, buffer in case.layer.module.named_buffers()
        if buffer.ndim >= _MATRIX_AXES and buffer.shape[-1] != length
    ]
    cause = f" (the layer has the buffer {' and '.join(buffers)})" if buffers else ""
    return _failed(
        "input lengths",
        f"{works}T = {length} fails{cause}: {error}",
        "The layer accepts only some input lengths.",
        "A mask has the shape (T, T), never (K, K). Create it for the maximum number of tokens and slice it, "
        "mask[:T, :T], or create it in forward.",
    )


def _check_output_shape(case: _Case) -> Item:
    name = "output shape"
    if case.output.shape == case.states.shape:
        return _passed(name, _shape(case.output))
    is_bare_head = case.num_heads in {None, 1} and case.output.shape[:-1] == case.states.shape[:-1]
    if is_bare_head and case.softmax is not None and case.num_maps == 1:
        return _passed(
            name, f"{_shape(case.output)}: one head, to be concatenated with others and projected to D"
        )
    return _failed(
        name,
        f"{_shape(case.output)} for an input of {_shape(case.states)}",
        "The residual connection adds input and output, so both must have the shape (B, T, D).",
        "Concatenate the heads, (B, H, T, K) -> (B, T, H * K), and project the result to D.",
    )


def _check_score_shape(case: _Case) -> Item:
    name = "score shape"
    if case.softmax is not None:
        return _passed(name, f"softmax of {_shape(case.softmax.scores)}")
    if not case.trace.softmaxes:
        return _skipped(name, "the layer calls no softmax")
    shapes = ", ".join(_shape(softmax.scores) for softmax in case.trace.softmaxes)
    measured = f"softmax of {shapes}; expected (..., T, T) = (..., {case.num_tokens}, {case.num_tokens})"
    if case.exchanges_axes:
        return _failed(
            name, measured, "Scores compare each text with each text of the batch.", _fix_axes(case)
        )
    return _failed(
        name,
        measured,
        "Scores compare each token with each token. These compare other axes.",
        "Multiply queries (..., T, K) by keys transposed in the last two axes, (..., K, T).",
    )


def _check_softmax_axis(case: _Case) -> Item:
    name = "softmax axis"
    if case.softmax is None:
        return _skipped(name, "no softmax of scores was observed")
    if case.attention.is_repeated:
        return _failed(
            name,
            "applied to the result of the softmax again",
            "Weights are between 0 and 1, so the second softmax makes them almost equal.",
            "Apply the softmax once.",
        )
    axis = case.softmax.axis
    if axis == -1:
        return _passed(name, "over keys (the last axis)")
    over = "queries" if axis == -_MATRIX_AXES else f"axis {axis} of {_shape(case.softmax.scores)}"
    return _failed(
        name,
        f"over {over}",
        "The weights of one query do not sum to 1; queries compete for keys instead of keys for a query.",
        "Use softmax(dim=-1).",
    )


def _check_row_sums(case: _Case) -> Item:
    name = "row sums"
    if case.weights is None:
        return _skipped(name, "no weights: return them after the output, or use torch.softmax")
    sums, columns = case.weights.sum(dim=-1), case.weights.sum(dim=-2)
    smallest = float(case.weights.min())
    error = float((sums - 1).abs().max())
    if error <= _TOLERANCE and smallest >= 0:
        return _check_applied_weights(case) or _passed(name, f"1 within {error:.0e}")
    if (reduced := _reduced_precision(case, error)) is not None:
        return reduced
    is_transposed = float((columns - 1).abs().max()) <= _TOLERANCE
    return _failed(
        name,
        f"{float(sums.min()):.3g} to {float(sums.max()):.3g}"
        + ("; columns sum to 1" if is_transposed else "")
        + (f"; smallest weight {smallest:.3g}" if smallest < 0 else ""),
        "The output is not a weighted average of values.",
        "Apply the softmax over keys, after the mask, and return the weights before dropout.",
    )


def _check_applied_weights(case: _Case) -> Item | None:
    """Return a failure if the product with values uses the transposed weights."""
    product = case.attention.context
    if product is None:
        return None
    rows, columns = (float((product.left.sum(dim=axis) - 1).abs().max()) for axis in (-1, -2))
    if rows <= _TOLERANCE or columns > _TOLERANCE:
        return None
    return _failed(
        "row sums",
        f"of the factor of the values: off by {rows:.2g}; its columns sum to 1",
        "The weights are transposed: the output of a token depends on how much others attend to it.",
        "Multiply without a transpose: weights (..., T, T) @ values (..., T, K).",
    )


def _reduced_precision(case: _Case, error: float) -> Item | None:
    """Return a failure if `error` is rounding in a softmax of reduced precision."""
    dtype = None if case.softmax is None else case.softmax.scores.dtype
    if dtype not in {torch.float16, torch.bfloat16} or error > torch.finfo(dtype).eps * case.num_tokens:
        return None
    return _failed(
        "row sums",
        f"1 within {error:.0e}: the softmax is computed in {str(dtype).removeprefix('torch.')}",
        "Weights are rounded to two or three digits, and so is the output.",
        "Compute the softmax in float32, also with autocast: scores.float().softmax(dim=-1).",
    )


def _check_scale(case: _Case) -> Item:
    name = "scaling"
    scale, head_size = case.trace.scale(case.attention), case.head_size
    if scale is None or head_size is None or case.softmax is None:
        return _skipped(name, "scores are not a multiple of query and key products of linear layers")
    expected = case.scale or head_size**-0.5
    text = "`scale`" if case.scale else f"1 / sqrt({head_size})"
    if math.isclose(scale, expected, rel_tol=1e-3):
        return _passed(name, f"{scale:.4g} = {text}")
    return _failed(
        name,
        f"{scale:.4g} instead of {text} = {expected:.4g}; "
        f"trace of the softmax Jacobian {_jacobian_trace(case.softmax):.2g}",
        f"Products of {head_size} components grow with K: the softmax saturates and its gradient vanishes."
        if scale > expected
        else "Scores are too small: weights differ little between keys.",
        _explain_scale(case, scale, head_size),
    )


def _explain_scale(case: _Case, scale: float, head_size: int) -> str:
    """Return the remedy for a wrong factor of the scores."""
    root = "Divide scores by the square root of the head size, K"
    causes = {
        1 / head_size: "The factor is applied twice: scale either the queries or the scores, by 1 / sqrt(K).",
        math.sqrt(head_size): f"{root}, instead of multiplying them.",
        1 / math.sqrt(case.num_tokens): f"{root}, not of the number of tokens.",
    }
    if head_size**2 == case.hidden_size:
        del causes[1 / head_size]  # as likely the square root of the hidden size
    found = (remedy for factor, remedy in causes.items() if math.isclose(scale, factor, rel_tol=1e-3))
    return next(found, f"{root}, not of the hidden size.")


def _check_heads(case: _Case) -> Item:
    name = "heads"
    if case.softmax is None:
        return _skipped(name, "no softmax of scores was observed")
    count = case.num_maps
    maps = case.softmax.weights.reshape(2, count, case.num_tokens, case.num_tokens)
    if case.num_heads is not None and count != case.num_heads:
        return _failed(
            name,
            f"{count} attention map{'s' if count != 1 else ''} instead of {case.num_heads}",
            "The heads do not attend independently.",
            "Split queries, keys and values into heads before the product: (B, T, D) -> (B, H, T, K).",
        )
    for first in range(count):
        for second in range(first + 1, count):
            if maps[:, first].allclose(maps[:, second], rtol=0, atol=1e-6):
                return _failed(
                    name,
                    f"heads {first} and {second} are equal",
                    "Equal heads compute the same output, so one of them is useless.",
                    "Give each head its own part of the projections, and initialize these differently.",
                )
    return (
        _check_inputs_of_heads(case)
        or _check_joined_heads(case)
        or _passed(name, f"{count}, all different" if count > 1 else "1")
    )


def _check_inputs_of_heads(case: _Case) -> Item | None:
    """Return a failure if each head reads only some features of the hidden states."""
    order = torch.randperm(case.hidden_size, generator=torch.Generator().manual_seed(0))
    features = order[:_NUM_FEATURES]
    changed = torch.arange(len(features))
    states = case.states[:1].repeat(len(features) + 1, 1, 1)  # one text for each feature, after the original
    states[1 + changed, :, features] += 1.0
    attention = case.attention_of(case.layer.trace(states))
    inputs = {"values": None if attention.context is None else attention.context.right}
    if attention.scoring is not None:
        inputs |= {"queries": attention.scoring.left, "keys": attention.scoring.right.mT}
    for name, operand in inputs.items():
        if operand is None or operand.numel() % (len(states) * case.num_tokens):
            continue
        heads = operand.reshape(len(states), -1, case.num_tokens, operand.shape[-1])
        effect = (heads[1:] - heads[:1]).abs().mean(dim=(2, 3))  # (features, H)
        effect = (effect / effect.amax(dim=1, keepdim=True)).nan_to_num(1.0)
        weak = (effect / effect.amax(dim=0) < _WEAK).double().mean(dim=0)  # (H,)
        if len(weak) > 1 and float(weak.min()) > _MAX_WEAK_SHARE:
            return _failed(
                "heads",
                f"{name} of each head ignore {100 * float(weak.min()):.0f} % of the input features or more",
                "Each head reads only a slice of the hidden states.",
                "Project all D features to Q, K and V first, and then split these into heads.",
            )
    return None


def _check_joined_heads(case: _Case) -> Item | None:
    """Return a failure if the contexts of the heads are not concatenated for each token."""
    context = case.attention.context
    joining = Joining.UNKNOWN if context is None else case.trace.joining(context, case.output)
    if joining is Joining.MIXED:
        return _failed(
            "heads",
            "the vector of a token contains contexts of other tokens",
            "Heads are joined in memory order, (B, H, T, K), so tokens are mixed, later ones included.",
            "Transpose before the reshape: contexts.transpose(1, 2).reshape(B, T, H * K).",
        )
    if joining is Joining.ADDED:
        return _failed(
            "heads",
            "the contexts of the heads are added",
            "All heads share one output projection, which cannot distinguish them.",
            "Concatenate the heads, (B, H, T, K) -> (B, T, H * K), and project the result to D.",
        )
    return None


def _check_token_scores(case: _Case) -> Item:
    name = "scores of token pairs"
    if case.softmax is None:
        return _skipped(name, "no softmax of scores was observed")
    last = case.num_tokens - 1
    changed = case.states.clone()
    changed[:, last] += 1.0
    after = case.attention_of(case.layer.trace(changed)).softmax
    assert after is not None  # noqa: S101 - the same operators as for the first states
    difference = (after.scores - case.softmax.scores)[..., :last, :last]
    keep = visible(case.softmax.scores)[..., :last, :last]
    largest = float(difference[keep].abs().max()) if keep.any() else 0.0
    # The softmax cancels a change of a whole row.
    effect = float(centered(difference, keep).abs().max())
    if effect <= _TOLERANCE * max(1.0, float(case.softmax.scores[visible(case.softmax.scores)].abs().max())):
        return _passed(name, "depend on the two tokens alone")
    return _failed(
        name,
        f"a change of token {last} changes scores between other tokens by up to {largest:.2g}",
        "Heads mix components of different tokens.",
        "Split heads with view(B, T, H, K).transpose(1, 2); view(B, H, T, K) keeps the memory order and "
        "cuts tokens into pieces.",
    )


def _check_batch(case: _Case) -> Item:
    name = "batch independence"
    changed = case.states.clone()
    changed[1] += 1.0
    difference = float(case.change(changed)[0].max())
    rows = case.influence()
    gradient = max(float(rows[0, :, 1].max()), float(rows[1, :, 0].max()))
    if case.is_zero(difference) and gradient == 0:
        return _passed(name, "a change of text 1 has no effect on text 0")
    return _failed(
        name,
        f"a change of text 1 changes text 0 by up to {difference:.2g} (gradient {gradient:.2g})",
        "Texts attend to each other, so a result depends on the other texts of its batch.",
        _fix_axes(case),
    )


def _fix_axes(case: _Case) -> str:
    """Return the remedy for texts that attend to each other."""
    inner = (
        name
        for name, module in case.layer.module.named_modules()
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first
    )
    if name := next(inner, None):
        return (
            f"{name} is an nn.MultiheadAttention with batch_first=False, which takes (T, B, D): create it "
            "with batch_first=True. If the layer itself takes (T, B, D), pass a `call` that transposes."
        )
    return "Check the order of the first two axes (batch_first), and that nothing is reduced over the batch."


def _check_pattern(case: _Case) -> Item:
    name = "attention pattern" if case.allowed else "causal mask"
    if case.exchanges_axes:
        return _skipped(name, _EXCHANGED)
    rows = case.influence()[0, :, 0]  # (T, T): gradient of output token i to input token j
    if case.allowed is not None:
        allowed = case.allowed(case.num_tokens).bool()
    else:
        allowed = torch.ones_like(rows, dtype=torch.bool)
        allowed = allowed.tril() if case.is_causal else allowed
    if case.softmax is not None and bool((case.visible_pairs == ~allowed).all()):
        return _failed(
            name,
            "tokens attend to exactly those tokens that they must not see",
            "The mask is applied to the wrong tokens.",
            "The mask is inverted: masked_fill(mask, -inf) hides the pairs for which the mask is True.",
        )
    if bool(rows.isnan().any()):
        return _failed(
            name,
            "gradients are NaN",
            "A query without any key has a row of NaN, which spreads to all other results.",
            "Let each token attend to itself, or mask with a large negative number instead of -inf.",
        )
    hidden = _pairs(allowed & (rows == 0))
    if hidden:
        return _failed(
            name,
            f"token {hidden[0][0]} cannot attend to token {hidden[0][1]} "
            f"({len(hidden)} of {int(allowed.sum())} pairs)",
            "The layer hides context that it is expected to use.",
            "Compare the mask with the expected pattern: torch.triu(..., diagonal=1) masks only later "
            "tokens. If the layer is causal, pass is_causal=True.",
        )
    return (
        _check_leaks(case, name, ~allowed, rows)
        or _check_pattern_with_mask(case, name, ~allowed)
        or _passed(name, _describe_pattern(case))
    )


def _check_leaks(case: _Case, name: str, forbidden: Tensor, rows: Tensor) -> Item | None:
    """Return a failure if tokens have an effect on tokens that must not see them."""
    leaks = _pairs(forbidden & (rows > _NO_GRADIENT * rows.max()))
    if not leaks:
        return None
    query, key = leaks[0]
    changed = case.states.clone()
    changed[:, key] += 1.0
    difference = float(case.change(changed)[:, query].max())
    is_masked = case.softmax is not None and not bool((case.visible_pairs & forbidden).any())
    return _failed(
        name,
        f"a change of token {key} changes token {query} by up to {difference:.2g} "
        f"(gradient {float(rows[query, key]):.2g}, {len(leaks)} such pairs)",
        "Tokens see tokens that they must not see. In a decoder, training loss is low and generation fails.",
        "The scores are masked correctly, so tokens are mixed elsewhere: check how heads are split and "
        "joined (transpose(1, 2)), and that nothing else is computed over tokens."
        if is_masked
        else "Set the scores of masked keys to -inf before the softmax. Setting weights to 0 after the "
        "softmax leaks through the sum.",
    )


def _check_pattern_with_mask(case: _Case, name: str, forbidden: Tensor) -> Item | None:
    """Return a failure if a padding mask replaces the causal mask."""
    if not case.layer.takes_mask or not bool(forbidden.any()):
        return None
    try:
        rows = case.influence(torch.ones(2, case.num_tokens, dtype=torch.bool))[0, :, 0]
    except LayerCallError:
        return None  # reported by the check of the padding mask
    leaks = _pairs(forbidden & (rows > _NO_GRADIENT * rows.max()))
    if not leaks:
        return None
    return _failed(
        name,
        f"with a padding mask, token {leaks[0][0]} depends on token {leaks[0][1]} ({len(leaks)} such pairs)",
        "Batches with padding see tokens that they must not see.",
        "Combine both masks: a key is visible if it is allowed and no padding.",
    )


def _pairs(mask: Tensor) -> list[tuple[int, int]]:
    return [(int(i), int(j)) for i, j in mask.nonzero()]


def _describe_pattern(case: _Case) -> str:
    if case.allowed is not None:
        return "as expected, in gradients"
    return "no effect of later tokens, in gradients" if case.is_causal else "none: each token attends to all"


def _check_padding(case: _Case) -> Item:
    name = "padding mask"
    if case.exchanges_axes:
        return _skipped(name, _EXCHANGED)
    if not case.layer.takes_mask:
        return _skipped(name, "forward takes no mask: batches of texts with different lengths need one")
    keep = torch.ones(2, case.num_tokens, dtype=torch.bool)
    keep[0, -2:] = False
    try:
        with torch.no_grad():
            before = case.layer.run(case.states, keep)[0]
            alone = case.layer.run(case.states[:1, :-2])[0]
            shared = float((before[1] - case.output[1]).abs().max())
        changed = case.states.clone()
        changed[0, -2:] += 1.0
        difference = float(case.change(changed, keep, before)[0, :-2].max())
        rows = case.influence(keep)[0, :-2, 0]
        gradient = float(rows[:, -2:].max())
        gradient = 0.0 if gradient <= _NO_GRADIENT * float(rows.max()) else gradient
        if case.is_causal and case.is_zero(difference):
            difference = _change_of_leading_padding(case)
    except LayerCallError as error:
        return _failed(
            name,
            f"mask {_shape(keep)}: {error}",
            "Batches of texts with different lengths cannot be computed.",
            "Accept a mask (B, T) and broadcast it as (B, 1, 1, T); see `mask_style` and `call`.",
        )
    extra = float((before[:1, :-2] - alone).abs().max())
    if case.is_zero(difference) and not case.is_zero(shared):
        return _failed(
            name,
            f"padding of text 0 changes text 1, which has none, by up to {shared:.2g}",
            "A text's result depends on the padding of the other texts of its batch.",
            "Broadcast the mask (B, T) as (B, 1, 1, T), so that each text has its own.",
        )
    if case.is_zero(difference) and case.is_zero(extra) and gradient == 0:
        return _passed(name, f"padding has no effect; difference from the text alone {extra:.0e}")
    return _failed(
        name,
        f"a change of padding changes tokens by up to {difference:.2g} (gradient {gradient:.2g}); "
        f"difference from the text alone {extra:.2g}",
        "A text's result depends on how much padding its batch needs.",
        "Set scores of padded keys (the last axis) to -inf before the softmax, and check the meaning of the "
        "mask: True for tokens or for padding (`mask_style`).",
    )


def _change_of_leading_padding(case: _Case) -> float:
    """Return the effect of padding before the text, which a causal mask does not hide."""
    keep = torch.ones(2, case.num_tokens, dtype=torch.bool)
    keep[0, :2] = False
    with torch.no_grad():
        before = case.layer.run(case.states, keep)[0]
    changed = case.states.clone()
    changed[0, :2] += 1.0
    return float(case.change(changed, keep, before)[0, 2:].max())


def _check_permutation(case: _Case) -> Item:
    name = "token order"
    if (rotation := _check_rotation(case)) is not None:
        return rotation
    if case.is_causal or case.allowed or case.uses_positions:
        return _skipped(name, "the layer depends on positions: is_causal, allowed or uses_positions is set")
    order = torch.randperm(case.num_tokens)
    if order.equal(torch.arange(case.num_tokens)):
        order = order.flip(0)
    with torch.no_grad():
        output = case.layer.run(case.states[:, order])[0]
    difference = float((output - case.output[:, order]).abs().max())
    if case.is_zero(difference):
        return _passed(name, f"permuted tokens give permuted outputs (difference {difference:.0e})")
    return _failed(
        name,
        f"permuted tokens change outputs by up to {difference:.2g}",
        "Self-attention without positions does not depend on the order of tokens.",
        "Check transposes and reshapes; pass uses_positions=True if the layer adds positions itself.",
    )


def _check_rotation(case: _Case) -> Item | None:
    """Check the rotation of queries and keys by positions. Return None if they are not rotated."""
    name = "token order"
    if case.attention.scoring is None or "scores of token pairs" in case.failed:
        return None
    equal = torch.randn(2, 1, case.hidden_size).expand_as(case.states)  # texts that repeat one vector
    scoring = case.attention_of(case.layer.trace(equal)).scoring
    if scoring is None:
        return None
    operands = [case.trace.heads(each) for each in (scoring.left, scoring.right.mT)]  # (B, H, T, K)
    # An added position vector is the same in both texts; a rotated vector is not.
    contents = [each[0] - each[1] for each in operands]
    if not any(bool(((each - each[:, :1]).abs() > _TOLERANCE * each.abs().max()).any()) for each in contents):
        if not case.trace.is_rotated(case.attention.scoring.left):
            return None
        return _failed(
            name,
            "queries are rotated by the same angles at all positions",
            "The rotation has no effect on the scores.",
            "Compute the angles from the position of the token, along the axis T, not along the heads.",
        )
    products = case.trace.heads(scoring.result)
    shifted = float((products[..., 1:, 1:] - products[..., :-1, :-1]).abs().max())
    if shifted <= _TOLERANCE * max(1.0, float(products.abs().max())):
        return _passed(
            name, "rotated queries and keys: scores of equal tokens depend on their distance alone"
        )
    return _failed(
        name,
        f"scores of equal tokens at the same distance differ by up to {shifted:.2g}",
        "Scores depend on absolute positions, so a text has other results after more padding or context.",
        "Rotate the same pairs of components in both queries and keys, by angles proportional to the "
        "position.",
    )


def _check_initialization(case: _Case) -> Item:
    name = "initialization"
    if case.is_trained or case.softmax is None:
        return _skipped(name, "is_trained is set" if case.is_trained else "no softmax of scores was observed")
    scores = case.softmax.scores[visible(case.softmax.scores)]
    spread, size = float(scores.std()), float(case.output.std())
    measured = f"standard deviation of scores {spread:.2g}, of outputs {size:.2g}, for inputs of 1"
    if spread <= _MAX_SCORE_STD and size <= _MAX_OUTPUT_STD:
        return _passed(name, measured)
    return _failed(
        name,
        f"{measured}; trace of the softmax Jacobian {_jacobian_trace(case.softmax):.2g}",
        "Each query attends to a single key from the start, and almost no gradient reaches the projections.",
        "Initialize projections with nn.init.xavier_uniform_, not with a standard normal distribution.",
    )


def _check_gradients(case: _Case) -> Item:
    name = "gradients"
    module = case.layer.module
    parameters = [
        (key, parameter)
        for key, parameter in module.named_parameters()
        if parameter.requires_grad
        and parameter.ndim >= _MATRIX_AXES  # a key bias has none: the softmax cancels it
    ]
    module.zero_grad()
    # Enough tokens that each routed head and each unit with a ReLU is active for some of them.
    output = case.layer.run(torch.randn(_NUM_GRADIENT_TEXTS, *case.states.shape[1:]))[0]
    (output * torch.randn_like(output)).sum().backward()  # type: ignore[no-untyped-call]
    missing = [part for key, each in parameters if (part := _untrained_part(case, key, each)) is not None]
    module.zero_grad()
    if not missing:
        return _passed(name, f"{len(parameters)} weight matrices")
    return _failed(
        name,
        f"none for {', '.join(missing)}",
        "These weights are never trained.",
        "Use them in forward, and do not detach or re-create tensors on the way.",
    )


def _untrained_part(case: _Case, key: str, parameter: nn.Parameter) -> str | None:
    """Return the name of a weight matrix, or of its rows or columns, that has no gradient, or None."""
    gradient = parameter.grad
    if gradient is None or not bool(gradient.any()):
        return key
    if parameter.ndim != _MATRIX_AXES:
        unused = any(
            size == _NUM_FUSED and not bool(gradient.transpose(0, axis).flatten(1).any(dim=1).all())
            for axis, size in enumerate(gradient.shape)
        )
        return f"a third of {key}" if unused else None
    if not case.trace.is_factor(parameter.detach()):
        return None  # a table, of which a short text uses some rows
    length = max(2, case.head_size or case.hidden_size // (case.num_heads or 1))
    for axis, name in enumerate(("rows", "columns")):
        zero = ~gradient.transpose(0, axis).any(dim=1)
        is_third = len(zero) % _NUM_FUSED == 0 and bool(zero.view(-1, _NUM_FUSED).all(dim=0).any())
        if is_third or (len(zero) >= length and bool(zero.unfold(0, length, 1).all(dim=1).any())):
            found = zero.nonzero().flatten()
            return f"{name} {int(found[0])} to {int(found[-1])} of {key} ({len(found)} of {len(zero)})"
    return None


def _check_evaluation(case: _Case) -> Item:
    name = "dropout in evaluation"
    difference = float(case.change(case.states).nan_to_num(0.0).max())
    if difference == 0:
        return _passed(name, "two calls are equal")
    return _failed(
        name,
        f"two calls differ by up to {difference:.2g}",
        "Results are random in eval mode.",
        "Use nn.Dropout, or F.dropout(..., training=self.training): F.dropout is active by default.",
    )


def _check_dropout(case: _Case) -> Item:
    name = "dropout in training"
    expected = _applied_row_sums(case)
    if case.softmax is None or expected is None:
        return _skipped(name, "no product of weights and values was observed")
    with case.layer.training():
        zeros = _share_of_zeros(case) - float((case.softmax.scores == 0).double().mean())
        if zeros > _MIN_DROPPED_SHARE:
            return _failed(
                name,
                f"{100 * zeros:.0f} % of the scores are set to 0",
                "A score of 0 does not remove a key: it gives the key an average weight.",
                "Apply dropout to the weights after the softmax.",
            )
        applied = [_applied_row_sums(case) for _ in range(2)]
        if None not in applied and torch.equal(*[each for each in applied if each is not None]):
            return _passed(name, "none on weights")
        applied += [_applied_row_sums(case) for _ in range(_NUM_DROPOUT_RUNS - len(applied))]
    sums = torch.stack([each for each in applied if each is not None]).double() - expected
    if float(sums.std(dim=0).max()) <= _EXACT:
        return _passed(name, "none on weights")
    errors = sums.mean(dim=-1)
    error = float(errors.mean())
    z_score = abs(error) / (float(errors.std()) / math.sqrt(len(errors)))
    measured = f"row sums change by {error:+.3f} on average, in {len(errors)} runs"
    if z_score <= _MAX_Z_SCORE:
        return _passed(name, measured)
    return _failed(
        name,
        measured,
        "Weights have a different size in training than in evaluation.",
        "Divide the remaining weights by the probability of keeping a weight, as nn.Dropout does.",
    )


def _share_of_zeros(case: _Case) -> float:
    """Return the share of scores that are exactly 0 in one run."""
    softmax = case.attention_of(case.layer.trace(case.states)).softmax
    return 0.0 if softmax is None else float((softmax.scores == 0).double().mean())


def _check_reference(case: _Case) -> Item:
    name = "reference"
    if case.reference is None:
        return _skipped(name, "no reference was given")
    expected = case.reference(case.states)
    if expected.shape != case.output.shape:
        difference = math.inf
    else:
        difference = float((expected.detach() - case.output).abs().max())
    if difference <= _EXACT:
        return _passed(name, f"maximum absolute difference {difference:.0e}")
    return _failed(
        name,
        f"maximum absolute difference {difference:.2g}, limit {_EXACT:.0e}",
        "The layer computes another function than the reference.",
        "Copy the reference's weights first; then compare scores, weights and output, in this order.",
    )


_ITEMS: tuple[Callable[[_Case], Item], ...] = (
    _check_lengths,
    _check_output_shape,
    _check_evaluation,
    _check_batch,
    _check_score_shape,
    _check_softmax_axis,
    _check_token_scores,
    _check_heads,
    _check_scale,
    _check_row_sums,
    _check_pattern,
    _check_padding,
    _check_permutation,
    _check_initialization,
    _check_gradients,
    _check_dropout,
    _check_reference,
)
_NEED_REPRODUCIBLE_RESULTS = {
    _check_batch: "batch independence",
    _check_token_scores: "scores of token pairs",
    _check_padding: "padding mask",
    _check_permutation: "token order",
    _check_dropout: "dropout in training",
    _check_reference: "reference",
}
"""Items that compare the results of two runs, with their names."""

_NEED_FINITE_RESULTS = _NEED_REPRODUCIBLE_RESULTS | {
    _check_row_sums: "row sums",
    _check_heads: "heads",
    _check_initialization: "initialization",
    _check_gradients: "gradients",
}
"""Items to which NaN would look like another mistake, with their names."""


def _applied_row_sums(case: _Case) -> Tensor | None:
    """Return the sums over keys of the weights that multiply the values in one training run."""
    product = case.attention_of(case.layer.trace(case.states)).context
    return None if product is None else product.left.sum(dim=-1).flatten()


def _jacobian_trace(softmax: Softmax) -> float:
    """Return the mean trace of d weights / d scores per row: the sum of w (1 - w)."""
    return float((softmax.weights * (1 - softmax.weights)).sum(dim=-1).mean())


def _passed(name: str, measured: str) -> Item:
    return Item(name, Status.PASSED, measured)


def _failed(name: str, measured: str, meaning: str, remedy: str) -> Item:
    return Item(name, Status.FAILED, measured, meaning, remedy)


def _skipped(name: str, reason: str) -> Item:
    return Item(name, Status.SKIPPED, reason)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
