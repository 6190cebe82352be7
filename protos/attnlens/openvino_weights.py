"""The weights of a graph that OpenVINO computes in bf16, held in bf16.

OpenVINO keeps the weights as a graph has them for as long as it is open, beside those that it has made ready
for its products. In fp32 that was a fifth of a server's memory (docs/performance.md).

For the server, and for what checks its numbers. This runs where OpenVINO is installed.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from openvino import Model, Node

MIN_NUMBERS = 2**14
"""Smaller weights stay as they are."""

# So OpenVINO's own files mark a stored type that is not to be computed at once, but where it is used.
_DECOMPRESSION = "decompression_0"


def hold_in_bf16(model: "Model") -> int:
    """Store the large matrices and the tables of token ids of a model that was just read in bf16.

    They are rounded to the nearest bf16, which a model that is compiled with the hint `bf16` would do anyway.

    Returns:
        How many there were.
    """
    from openvino import Tensor, Type  # noqa: PLC0415 - the package of this module is installed without it
    from openvino.op import Constant  # noqa: PLC0415
    from openvino.opset13 import convert  # noqa: PLC0415

    weights = [*_weights(model)]
    for weight in weights:
        rounded = Tensor(to_bf16(weight.data), weight.shape, Type.bf16)
        stored = Constant(rounded, shared_memory=False)
        used = convert(stored, "f32")
        used.get_rt_info()[_DECOMPRESSION] = ""
        for place in weight.output(0).get_target_inputs():
            place.replace_source_output(used.output(0))
    return len(weights)


def to_bf16(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bf16 of finite numbers, of two as near the even one."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def _weights(model: "Model") -> Iterator["Node"]:
    """Yield the constants that products multiply by, and those that token ids look up."""
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type().get_type_name() != "f32":
            continue
        is_large = len(node.shape) > 1 and int(np.prod(node.shape)) >= MIN_NUMBERS
        users = [place.get_node() for place in node.output(0).get_target_inputs()]
        if is_large and users and all(map(_takes_weights, users)):
            yield node


def _takes_weights(user: "Node") -> bool:
    kind: str = user.get_type_name()
    if kind != "Gather":
        return kind == "MatMul"
    ids = user.input_value(1).get_node()
    if ids.get_type_name() == "Convert":
        ids = ids.input_value(0).get_node()
    source: str = ids.get_type_name()
    return source == "Parameter"
