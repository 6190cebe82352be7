"""Comparison of the weights in an ONNX file with an encoder, and reconstruction of an encoder from them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from attnlens_export.errors import GraphError
from attnlens_export.graph.read import read_structure, read_weight
from attnlens_export.graph.simplify import TRANSPOSED_SUFFIX
from attnlens_model import Encoder, EncoderConfig, ModuleEncoder, new_published


def compare_weights(path: Path, encoder: Encoder | ModuleEncoder, name: str) -> None:
    """Compare the weights of a graph with the parameters of the reference, bit for bit.

    Raises:
        GraphError: A parameter differs, is missing, or has a different shape.
    """
    parameters = _stored_parameters(path, encoder)
    for parameter, array in _parameter_arrays(path, parameters):
        found, expected = torch.from_numpy(array), parameters[parameter]
        if not torch.equal(found, expected):
            index = [int(axis) for axis in (found != expected).nonzero()[0]]
            raise GraphError(
                f"{path}: {parameter}{index} is {float(found[tuple(index)]):.8g}, "
                f"{float(expected[tuple(index)]):.8g} in {name}"
            )


def compare_tables(path: Path, encoder: Encoder | ModuleEncoder) -> int:
    """Compare the buffers of a graph, such as rotary cosines, with those of the encoder, bit for bit.

    Returns:
        Number of buffers in the graph. Buffers that the graph does not use are not in it.

    Raises:
        GraphError: A buffer differs.
    """
    buffers = dict(encoder.named_buffers())
    tensors = [tensor for tensor in read_structure(path).graph.initializer if tensor.name in buffers]
    for tensor in tensors:
        found = torch.from_numpy(read_weight(path.parent, tensor))
        expected = buffers[tensor.name]
        if found.shape != expected.shape or not torch.equal(found, expected):
            raise GraphError(
                f"{path}: the table {tensor.name} {tuple(found.shape)} differs from the encoder's "
                f"{tuple(expected.shape)}: export the checkpoint again"
            )
    return len(tensors)


def rebuild_encoder(path: Path, config: EncoderConfig) -> Encoder | ModuleEncoder:
    """Create a PyTorch encoder in fp32 and eval mode from the weights of an ONNX file.

    Weights that are not stored transposed are memory-mapped: do not change the file while the encoder is in
    use.

    Raises:
        GraphError: A parameter is missing, has a different shape, or is not finite.
    """
    encoder: Encoder | ModuleEncoder
    if config.is_published_module:
        encoder = new_published(path.parents[1], config.family)
    else:
        with torch.device("meta"):
            encoder = Encoder(config)
    weights = {}
    for name, array in _parameter_arrays(path, _stored_parameters(path, encoder)):
        if not np.isfinite(array).all():
            raise GraphError(f"{path}: {name} contains NaN or infinity")
        weights[name] = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    encoder.load_state_dict(weights, strict=not config.is_published_module, assign=True)
    return encoder.eval()


def _stored_parameters(path: Path, encoder: Encoder | ModuleEncoder) -> dict[str, torch.Tensor]:
    """Return the parameters that a graph must contain."""
    parameters = encoder.state_dict()
    if not isinstance(encoder, ModuleEncoder):
        return parameters
    # It may have parameters that only its training uses.
    tensors = read_structure(path).graph.initializer
    stored = {tensor.name.removesuffix(TRANSPOSED_SUFFIX) for tensor in tensors}
    return {each: value for each, value in parameters.items() if each in stored}


def _parameter_arrays(
    path: Path, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """Yield each parameter as a memory-mapped array.

    Raises:
        GraphError: A parameter is missing or has a different shape.
    """
    tensors = {tensor.name: tensor for tensor in read_structure(path).graph.initializer}
    for name, parameter in parameters.items():
        if name in tensors:
            array = read_weight(path.parent, tensors[name])
        elif name + TRANSPOSED_SUFFIX in tensors:
            array = read_weight(path.parent, tensors[name + TRANSPOSED_SUFFIX]).T
        else:
            raise GraphError(f"{path} contains no weight for the parameter {name}")
        if array.shape != tuple(parameter.shape):
            raise GraphError(
                f"{path}: {name} has the shape {array.shape} instead of {tuple(parameter.shape)}"
            )
        yield name, array
