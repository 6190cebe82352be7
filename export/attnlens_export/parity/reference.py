"""The PyTorch encoder as the reference for its graphs: in fp32, and layer by layer in float64.

B batch, T tokens, D width, H heads, L layers.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnlens_export.graph.names import HIDDEN_OUTPUT, output_name
from attnlens_export.parity.compare import FloatArray
from attnlens_export.parity.float64 import Float64Arithmetic
from attnlens_export.parity.grid import Inputs
from attnlens_model import Encoder, EncoderOutput, OutputRole

# From here on PyTorch may use all its threads.
_TOKENS_FOR_THREADS = 256

Tensors = dict[str, FloatArray]
"""By the names of a graph's outputs."""

EachOutput = Callable[[str, FloatArray], None]
"""Called with the name of an output of a layer, and the output."""


@torch.inference_mode()
def run_fp32(encoder: Encoder, inputs: Inputs, with_attentions: bool) -> Tensors:
    """Return the hidden states (B, T, D), and if asked for what the attention of each layer gives."""
    with _threads(inputs):
        output: EncoderOutput = encoder(**_tensors(inputs), output_attentions=with_attentions)
    layers = {
        output_name(role, layer): tensor.numpy()
        for layer, outputs in enumerate(output.layers)
        for role, tensor in outputs.items()
    }
    return {HIDDEN_OUTPUT: output.last_hidden_state.numpy()} | layers


def run_float64(encoder: Encoder, inputs: Inputs, each_output: EachOutput) -> FloatArray:
    """Return the hidden states of the same encoder in float64, and hand over what each layer computes."""
    numbers = itertools.count()

    def hand_over(_layer: object, _args: object, output: tuple[Tensor, Mapping[OutputRole, Tensor]]) -> None:
        layer = next(numbers)
        for role, tensor in output[1].items():
            each_output(output_name(role, layer), tensor.numpy())

    # Hooks, so that the outputs of no more than one layer exist at a time.
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
