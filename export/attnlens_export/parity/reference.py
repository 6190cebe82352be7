"""The PyTorch encoder as the reference of a comparison: in fp32, and layer by layer in float64.

Shapes: B texts in a batch, T tokens, D hidden size, H heads, N tokens of a batch without padding.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attnlens_export.graph.names import HIDDEN_OUTPUT, output_name
from attnlens_export.parity.grid import SEED, Case, Inputs, make_inputs
from attnlens_model import Encoder, EncoderConfig, EncoderOutput, ModuleEncoder, OutputRole
from attnlens_model.attention.mechanism import ChoosingModule

TOLERANCE = 1e-5
"""Maximum |ONNX - PyTorch fp32| of a model with small activations."""
REFERENCE_ERROR_RATIO = 4.0
"""Maximum |ONNX - PyTorch fp32| relative to the error of PyTorch fp32 against float64."""
CLEAR_MARGIN = 2 * TOLERANCE
"""Scores that differ by more than this have the same order in all runtimes within `TOLERANCE`."""
MAX_DRAWS = 20
"""Maximum number of draws of a text. If the weights of a router are all 0, every choice is a tie."""

RUN_LOCK = RLock()
"""Held while PyTorch runs an encoder: its hooks, and its tables in float64, are those of one run."""

# Maximum size of the parameters of an encoder that are kept in float64 between two inputs.
MAX_PARAMETER_BYTES = 2**27
_BLOCK_ELEMENTS = 2**17
# Number of tokens from which PyTorch uses all threads.
_MIN_TOKENS_FOR_THREADS = 256
# Operations that only select elements. Casting the result avoids casting a table of embeddings.
_LOOKUPS: frozenset[Callable[..., Any]] = frozenset({nn.functional.embedding, Tensor.__getitem__})

FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]

Tensors = dict[str, FloatArray]
"""Graph outputs by name."""

LayerOutputCallback = Callable[[str, FloatArray], None]
"""Called with the name of a layer output, and the output."""


def allowed_error(torch_max_abs_error_float64: float) -> float:
    """Return the maximum |ONNX - PyTorch fp32|, given max |PyTorch fp32 - PyTorch float64|.

    Rounding errors grow with the activations of a model, and a runtime can't be more exact than its
    reference.
    """
    return max(TOLERANCE, REFERENCE_ERROR_RATIO * torch_max_abs_error_float64)


@torch.inference_mode()
def run_fp32(encoder: Encoder | ModuleEncoder, inputs: Inputs, with_attentions: bool) -> Tensors:
    """Return the hidden states (B, T, D) and, if requested, the attention outputs of all layers."""
    with RUN_LOCK, _limit_threads(inputs):
        output: EncoderOutput = encoder(**_to_tensors(inputs), output_attentions=with_attentions)
    layers = {
        output_name(role, layer): tensor.numpy()
        for layer, outputs in enumerate(output.layers)
        for role, tensor in outputs.items()
    }
    return {HIDDEN_OUTPUT: output.last_hidden_state.numpy()} | layers


def run_float64(
    encoder: Encoder | ModuleEncoder,
    inputs: Inputs,
    each_output: LayerOutputCallback,
    arithmetic: "Float64Arithmetic | None" = None,
) -> FloatArray:
    """Return the hidden states in float64, and pass each attention output to `each_output`.

    Args:
        encoder: Encoder in fp32.
        inputs: Inputs.
        each_output: Called with each attention output.
        arithmetic: Reused for several inputs, so that most parameters are cast only once.
    """
    arithmetic = arithmetic or Float64Arithmetic()
    layers = itertools.count()

    def pass_outputs(
        _layer: object, _args: object, output: tuple[Tensor, Mapping[OutputRole, Tensor]]
    ) -> None:
        layer = next(layers)
        for role, tensor in output[1].items():
            each_output(output_name(role, layer), tensor.numpy())

    with RUN_LOCK:
        # With hooks, the outputs of only one layer exist at a time.
        hooks = [layer.register_forward_hook(pass_outputs) for layer in encoder.layers]
        try:
            with _limit_threads(inputs), _exact_tables(encoder), torch.inference_mode(), arithmetic:
                output: EncoderOutput = encoder(**_to_tensors(inputs))
        finally:
            for hook in hooks:
                hook.remove()
    return output.last_hidden_state.numpy()


@contextmanager
def differentiable(encoder: Encoder | ModuleEncoder, inputs: Inputs, dtype: torch.dtype) -> Iterator[None]:
    """Let PyTorch run an fp32 encoder in fp32 or float64 while the context is active, with gradients."""
    arithmetic = Float64Arithmetic(max_parameter_bytes=0)  # each is used once forwards and once backwards
    with RUN_LOCK, ExitStack() as contexts:
        contexts.enter_context(_limit_threads(inputs))
        if dtype == torch.float64:
            contexts.enter_context(_exact_tables(encoder))
            # Casts of parameters would take twice the memory of the parameters until the gradient is known.
            contexts.enter_context(saved_tensors_hooks(arithmetic.pack, arithmetic.unpack))
            contexts.enter_context(arithmetic)
        contexts.enter_context(torch.enable_grad())
        yield


class Float64Arithmetic(TorchFunctionMode):
    """Runs an fp32 module in float64 while active, without a float64 copy of its parameters.

    Each operation receives its fp32 arguments as float64. float64 represents every fp32 value exactly, so the
    result equals that of `module.double()`. Parameters are cast when they are first used and kept up to
    `max_parameter_bytes`. Others are cast for the duration of an operation.
    """

    def __init__(self, max_parameter_bytes: int = MAX_PARAMETER_BYTES) -> None:
        super().__init__()
        self._parameters: dict[nn.Parameter, Tensor] = {}
        self._free_bytes = max_parameter_bytes
        self._casts: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}  # by address

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - any operation
        """Run an operation in float64."""
        del types
        if func in _LOOKUPS:
            return _to_float64(func(*args, **(kwargs or {})))
        named = {name: self._cast(value) for name, value in (kwargs or {}).items()}
        # transformers casts norms, rotations and the softmax to fp32.
        func = Tensor.double if func is Tensor.float else func
        return func(*map(self._cast, args), **named)

    def _cast(self, value: Any) -> Any:  # noqa: ANN401 - any argument of an operation
        if value is torch.float32:  # as in tensor.to(torch.float32)
            return torch.float64
        if isinstance(value, list | tuple | dict):
            return pytree.tree_map(self._cast, value)
        if not isinstance(value, nn.Parameter) or value.dtype != torch.float32:
            return _to_float64(value)
        if value not in self._parameters:
            size_bytes = 8 * value.numel()
            if size_bytes > self._free_bytes:
                cast = value.double()
                self._casts[cast.untyped_storage().data_ptr()] = weakref.ref(cast), value
                return cast
            self._free_bytes -= size_bytes
            self._parameters[value] = value.double()
        return self._parameters[value]

    def pack(self, tensor: Tensor) -> tuple[Tensor, tuple[Any, ...] | None]:
        """Return the parameter in place of a cast that is saved for the gradient."""
        reference, parameter = self._casts.get(tensor.untyped_storage().data_ptr(), (None, None))
        if reference is None or parameter is None or reference() is None:
            return tensor, None
        return parameter, (tensor.size(), tensor.stride(), tensor.storage_offset())

    @staticmethod
    def unpack(packed: tuple[Tensor, tuple[Any, ...] | None]) -> Tensor:
        """Return the saved tensor. Parameters are cast again."""
        tensor, view = packed
        return tensor if view is None else tensor.detach().double().as_strided(*view)


def _to_float64(value: Any) -> Any:  # noqa: ANN401 - any argument of an operation
    is_fp32 = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.double() if is_fp32 else value


@contextmanager
def _exact_tables(encoder: Encoder | ModuleEncoder) -> Iterator[None]:
    """Recompute tables such as rotary angles in float64 while the context is active.

    Modules with tables and without parameters compute them when they are cast. Casting only the values would
    keep the rounding errors of fp32.
    """
    tables = [
        module
        for module in encoder.modules()
        if next(module.parameters(), None) is None
        and any(buffer.dtype == torch.float32 for buffer in module.buffers(recurse=False))
    ]
    try:
        for module in tables:
            module.double()
        yield
    finally:
        for module in tables:
            module.float()


def _to_tensors(inputs: Inputs) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in inputs.feed().items()}


@contextmanager
def _limit_threads(inputs: Inputs) -> Iterator[None]:
    """Limit PyTorch to one thread for small inputs.

    More threads do not make them faster. On a busy machine, each operation would wait for a thread that has
    no core.
    """
    threads = torch.get_num_threads()
    if inputs.input_ids.size < _MIN_TOKENS_FOR_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_clear_inputs(
    case: Case, config: EncoderConfig, encoder: Encoder | ModuleEncoder, seed: int = SEED
) -> Inputs:
    """Draw the inputs of a case like `make_inputs`, but redraw texts in which a choice is nearly a tie.

    An encoder may choose, such as the heads that a token uses. If two scores are nearly equal, another
    runtime may choose differently because of rounding, and everything after that differs. Omitting such texts
    would reduce the coverage, and a limit that accepts the difference would accept any error.

    Returns:
        The inputs. They depend on the case, the seed and the weights only. For an encoder that makes no
        choices, they equal those of `make_inputs`.
    """
    inputs = make_inputs(case, config, seed)
    if not any(isinstance(module, ChoosingModule) for module in encoder.modules()):
        return inputs
    for draw in range(1, MAX_DRAWS):
        is_close = smallest_margins(encoder, inputs) < CLEAR_MARGIN
        if not is_close.any():
            break
        inputs = _replace_texts(inputs, make_inputs(case, config, seed + draw), is_close)
    return inputs


def smallest_margins(encoder: Encoder | ModuleEncoder, inputs: Inputs) -> npt.NDArray[np.float64]:
    """Return the smallest margin of a choice for any token of each text, (B,). Infinite without tokens."""
    live = inputs.attention_mask == 1
    smallest = np.full(len(live), np.inf)

    def update(module: nn.Module, _args: object, output: object) -> None:
        assert isinstance(module, ChoosingModule)  # noqa: S101 - only these modules have the hook
        margins: Tensor = module.margins(output)
        np.minimum(smallest, np.where(live, margins.double().numpy(), np.inf).min(axis=1), out=smallest)

    choosing = [module for module in encoder.modules() if isinstance(module, ChoosingModule)]
    with RUN_LOCK:
        hooks = [module.register_forward_hook(update) for module in choosing]
        try:
            run_fp32(encoder, inputs, with_attentions=False)
        finally:
            for hook in hooks:
                hook.remove()
    return smallest


def _replace_texts(inputs: Inputs, others: Inputs, is_replaced: npt.NDArray[np.bool_]) -> Inputs:
    """Return `inputs` with the ids and types of some texts from `others`. The attention mask is kept."""
    live = inputs.attention_mask == 1
    # Ids are kept where `others` has padding.
    taken = is_replaced[:, None] & live & (others.attention_mask == 1)
    types = inputs.token_type_ids
    if types is not None and others.token_type_ids is not None:
        types = np.where(taken, others.token_type_ids, types)
    return replace(
        inputs, input_ids=np.where(taken, others.input_ids, inputs.input_ids), token_type_ids=types
    )


@dataclass(frozen=True)
class Difference:
    """Difference of two tensors, padding excluded.

    Attributes:
        max_abs: Maximum absolute difference. NaN if either tensor contains NaN.
        mean_abs: Mean absolute difference.
        p99_abs: 99th percentile of the absolute difference.
        min_cosine: Minimum cosine of two rows (hidden states: D values, attention: T). 1 if both are 0.
        count: Number of elements.
        index: Index of the maximum difference in the whole tensor.
        values: Values of both tensors at `index`.
    """

    max_abs: float
    mean_abs: float
    p99_abs: float
    min_cosine: float
    count: int
    index: tuple[int, ...]
    values: tuple[float, float]


def select_live(tensor: FloatArray, live: BoolArray) -> FloatArray:
    """Select the rows of tokens that are not padding. For attention, these are the queries with all keys.

    (B, T, D) -> (N, D), or (B, H, T, T) -> (N, H, T), with the mask `live` (B, T).
    """
    return tensor.transpose(0, 2, 1, 3)[live] if _is_attention(tensor) else tensor[live]


def max_abs_difference(first: FloatArray, second: FloatArray) -> float:
    """Return the maximum absolute difference of two arrays of the same shape. 0 for empty arrays."""
    errors = [
        np.abs(np.subtract(*block, dtype=np.float64)).max(initial=0.0) for block in _blocks(first, second)
    ]
    return float(np.max(errors, initial=0.0))


def _blocks(first: FloatArray, second: FloatArray) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield corresponding rows of two arrays, in blocks that fit into the cache of a core."""
    if not first.ndim:
        yield first, second
        return
    step = max(1, _BLOCK_ELEMENTS * len(first) // max(1, first.size))
    for start in range(0, len(first), step):
        yield first[start : start + step], second[start : start + step]


def difference(measured: FloatArray, expected: FloatArray, live: BoolArray) -> Difference:
    """Compare two tensors, both (B, T, D) or both (B, H, T, T), at tokens that are not padding.

    `live` (B, T) must contain at least one token.
    """
    first, second = select_live(measured, live), select_live(expected, live)
    error = np.subtract(first, second, dtype=np.float64)
    np.abs(error, out=error)
    index = np.unravel_index(int(error.argmax()), error.shape)
    row, token = (int(axis) for axis in np.argwhere(live)[index[0]])
    inner = [int(axis) for axis in index[1:]]
    return Difference(
        max_abs=float(error.max()),
        mean_abs=float(error.mean()),  # before the percentile, which changes the order
        p99_abs=_percentile99(error),
        min_cosine=_min_cosine(first, second),
        count=error.size,
        index=(row, inner[0], token, inner[1]) if _is_attention(measured) else (row, token, *inner),
        values=(float(first[index]), float(second[index])),
    )


def _is_attention(tensor: FloatArray) -> bool:
    return tensor.ndim == 4  # noqa: PLR2004 - (B, H, T, T)


def _percentile99(error: npt.NDArray[np.float64]) -> float:
    """Return the 99th percentile. Changes the order of `error`."""
    flat = error.reshape(-1)
    rank = int(0.99 * (flat.size - 1))
    flat.partition(rank)
    return float(flat[rank])


def _min_cosine(first: FloatArray, second: FloatArray) -> float:
    return float(np.min([_min_cosine_of_block(*block) for block in _blocks(first, second)]))


def _min_cosine_of_block(first: FloatArray, second: FloatArray) -> float:
    first, second = first.astype(np.float64), second.astype(np.float64)
    products = np.einsum("...e,...e->...", first, second)
    norms = np.sqrt(np.einsum("...e,...e->...", first, first) * np.einsum("...e,...e->...", second, second))
    cosines = np.divide(products, norms, out=np.ones_like(products), where=norms != 0)
    return float(cosines.min())
