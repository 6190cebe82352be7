"""Calls attention layers with different signatures in one way.

Shape legend: B batch, T tokens, D hidden size, H heads.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnlens_model.errors import ModelError
from attnlens_model.testing.trace import Recorder, Trace

MaskStyle = Literal["keep", "ignore", "additive"]
"""Meaning of a padding mask. "keep": (B, T) bool, True for tokens. "ignore": (B, T) bool, True for padding.
"additive": (B, 1, 1, T) float, added to the scores."""

LayerCall = Callable[..., object]
"""Function that runs a layer: `call(layer, hidden_states)`, or `call(layer, hidden_states, keep)` for a layer
with a padding mask. Hidden states are (B, T, D), and `keep` is (B, T) bool, True for tokens, or None."""

_MIN_WEIGHT_AXES = 3
_NUM_ARGUMENTS_WITHOUT_MASK = 2
_MASK_STYLES: dict[str, MaskStyle] = {
    "mask": "keep",
    "attention_mask": "keep",
    "key_padding_mask": "ignore",
    "padding_mask": "ignore",
    "src_key_padding_mask": "ignore",
}


class LayerCallError(ModelError):
    """The layer cannot be called, or its result is not hidden states with optional weights."""


class Layer:
    """A copy of a user's layer with a uniform way to call it.

    Attributes:
        module: The copy.
        takes_mask: Whether the layer accepts a padding mask.
    """

    def __init__(self, module: nn.Module, call: LayerCall | None, mask_style: MaskStyle | None) -> None:
        if mask_style is not None and mask_style not in get_args(MaskStyle):
            raise LayerCallError(
                f"mask_style={mask_style!r} is invalid: use {', '.join(get_args(MaskStyle))}"
            )
        self.module = copy.deepcopy(module)
        self._call, self.takes_mask = _adapted(call) if call else _default_call(self.module, mask_style)

    def run(self, hidden_states: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        Args:
            hidden_states: (B, T, D).
            keep: (B, T) bool, True for tokens and False for padding.

        Returns:
            The output and the returned attention weights (B, T, T) or (B, H, T, T), if any.

        Raises:
            LayerCallError: The layer fails, or does not return a tensor first.
        """
        try:
            result = self._call(self.module, hidden_states, keep)
        except Exception as error:
            raise LayerCallError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        parts = result if isinstance(result, (tuple, list)) else (result,)
        if not parts or not isinstance(parts[0], Tensor):
            raise LayerCallError(
                f"returns {type(result).__name__}: return hidden states (B, T, D), or a tuple of hidden "
                "states and attention weights"
            )
        num_tokens = hidden_states.shape[1]
        weights = next(
            (
                each
                for each in parts[1:]
                if isinstance(each, Tensor)
                and each.ndim >= _MIN_WEIGHT_AXES
                and each.shape[-2:] == (num_tokens, num_tokens)
            ),
            None,
        )
        return parts[0], weights

    def trace(self, hidden_states: Tensor) -> Trace:
        """Run the layer without a mask and return its softmaxes and matrix products."""
        with Recorder(*hidden_states.shape[:2]) as recorder, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            self.run(hidden_states)
        trace: Trace = recorder.trace
        return trace

    @contextmanager
    def training(self) -> Iterator[None]:
        """Switch the layer to training mode."""
        self.module.train()
        try:
            yield
        finally:
            self.module.eval()


def _adapted(call: LayerCall) -> tuple[LayerCall, bool]:
    """Return a function of three arguments, and whether it takes a padding mask."""
    if len(inspect.signature(call).parameters) > _NUM_ARGUMENTS_WITHOUT_MASK:
        return call, True
    return lambda module, hidden_states, _keep: call(module, hidden_states), False


def _default_call(module: nn.Module, mask_style: MaskStyle | None) -> tuple[LayerCall, bool]:
    """Return a function of three arguments for a module, and whether it takes a padding mask."""
    if isinstance(module, nn.MultiheadAttention):
        return _call_multihead_attention, True
    name = next((name for name in inspect.signature(module.forward).parameters if name in _MASK_STYLES), None)
    swap = isinstance(module, nn.TransformerEncoderLayer) and not module.self_attn.batch_first
    style = mask_style or _MASK_STYLES[name or "mask"]

    def call(module: nn.Module, hidden_states: Tensor, keep: Tensor | None) -> object:
        masks = {name: _mask(keep, style)} if name else {}
        result = module(hidden_states.transpose(0, 1) if swap else hidden_states, **masks)
        return result.transpose(0, 1) if swap and isinstance(result, Tensor) else result

    return call, name is not None


def _call_multihead_attention(module: nn.Module, hidden_states: Tensor, keep: Tensor | None) -> object:
    assert isinstance(module, nn.MultiheadAttention)  # noqa: S101 - ensured by the caller
    swap = not module.batch_first
    states = hidden_states.transpose(0, 1) if swap else hidden_states
    padding = None if keep is None else ~keep
    output, weights = module(
        states, states, states, key_padding_mask=padding, need_weights=True, average_attn_weights=False
    )
    return output.transpose(0, 1) if swap else output, weights


def _mask(keep: Tensor | None, style: MaskStyle) -> Tensor | None:
    if keep is None:
        return None
    if style == "additive":
        return torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)[:, None, None, :]
    return keep if style == "keep" else ~keep
