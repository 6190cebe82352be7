"""The PyTorch encoder as the reference for its graphs: in fp32, and layer by layer in float64.

B batch, T tokens, D width, H heads, L layers.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnlens_export.parity.compare import FloatArray
from attnlens_export.parity.float64 import Float64Arithmetic
from attnlens_export.parity.grid import Inputs
from attnlens_model import ATTENTION_WEIGHTS, Encoder, EncoderOutput, OutputRole

# From here on PyTorch may use all its threads.
_TOKENS_FOR_THREADS = 256

EachMap = Callable[[int, FloatArray], None]
"""Called with a layer's number and its attention map (B, H, T, T)."""


@torch.inference_mode()
def run_fp32(
    encoder: Encoder, inputs: Inputs, with_attentions: bool
) -> tuple[FloatArray, tuple[FloatArray, ...]]:
    """Return the hidden states (B, T, D) and L maps (B, H, T, T), or none."""
    with _threads(inputs):
        output = encoder(**_tensors(inputs), output_attentions=with_attentions)
    return output.last_hidden_state.numpy(), tuple(layer.numpy() for layer in output.attentions)


def run_float64(encoder: Encoder, inputs: Inputs, each_map: EachMap) -> FloatArray:
    """Return the hidden states of the same encoder in float64, and hand over each map as it is computed."""
    numbers = itertools.count()

    def hand_over(_layer: object, _args: object, output: tuple[Tensor, Mapping[OutputRole, Tensor]]) -> None:
        each_map(next(numbers), output[1][ATTENTION_WEIGHTS].numpy())

    # Hooks, so that no more than one layer's map exists at a time.
    hooks = [layer.register_forward_hook(hand_over) for layer in encoder.layers]
    try:
        with _threads(inputs), _exact_tables(encoder), torch.inference_mode(), Float64Arithmetic():
            output: EncoderOutput = encoder(**_tensors(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return output.last_hidden_state.numpy()


@contextmanager
def _exact_tables(encoder: Encoder) -> Iterator[None]:
    """Let modules that hold computed tables and no parameter, such as rotations, compute them in float64.

    They do so when they are cast, as a rounded table that is cast would still be rounded.
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


def _tensors(inputs: Inputs) -> dict[str, Any]:
    return {name: torch.from_numpy(array) for name, array in inputs.feed().items()}


@contextmanager
def _threads(inputs: Inputs) -> Iterator[None]:
    """Keep PyTorch to one thread for small inputs.

    More do not help there, and on a busy machine each operation then waits for a thread that has no core.
    """
    threads = torch.get_num_threads()
    if inputs.input_ids.size < _TOKENS_FOR_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
