"""OpenVINO settings shared by the server and the programs that verify its numbers.

Covers compile properties, bf16 storage of weights and the detection of bf16 instructions. Importing this
module does not import OpenVINO.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from openvino import Model, Node

OpenvinoPrecision = Literal["fp32", "bf16", "int8"]

PACKAGE: Final = "openvino"
"""Name of the engine and of its Python package."""

LENGTH_MULTIPLE = 16
"""Texts are padded to a multiple of this length, or to the model's last position, and a batch only contains
texts of one padded length. OpenVINO's softmax processes full vectors of 16 keys and the remaining keys with
different rounding. Equal padded lengths therefore make a text's result independent of its batch, bit for
bit."""

MIN_BF16_ELEMENTS = 2**14
"""Smaller weights are not converted to bf16."""

# Runtime attribute that keeps OpenVINO from folding the conversion of a stored constant.
_DECOMPRESSION = "decompression_0"

# Names of bf16 instruction sets in /proc/cpuinfo: x86 vectors and matrices, Arm NEON and SVE.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def compile_properties(
    device: str, precision: OpenvinoPrecision, *, threads: int, num_streams: int
) -> dict[str, str]:
    """Return the properties with which to compile a graph.

    Args:
        device: OpenVINO device, such as `CPU` or `GPU.1`.
        precision: Precision of embeddings. Attention and contributions are always compiled with `fp32`.
        threads: Number of CPU threads of all streams together.
        num_streams: Number of batches that run in parallel.
    """
    properties = {
        "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[compute_precision(device, precision)],
        "NUM_STREAMS": str(num_streams),
    }
    if device == "CPU":
        properties |= {
            "INFERENCE_NUM_THREADS": str(threads),
            # Threads pinned to cores compete with other processes that are pinned to the same cores.
            "ENABLE_CPU_PINNING": "NO",
            # By default, OpenVINO also rounds the inputs of matrix multiplications with 8-bit weights to 8
            # bits.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        }
    return properties


def compute_precision(device: str, precision: OpenvinoPrecision) -> Literal["fp32", "bf16"]:
    """Return the precision of the operations that the graph does not quantize itself.

    With `int8`, this is bf16 if the CPU has bf16 instructions: it is faster and as accurate
    (docs/performance.md).
    """
    is_bf16 = precision == "bf16" or (precision == "int8" and device == "CPU" and multiplies_bf16())
    return "bf16" if is_bf16 else "fp32"


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Return whether the processor has bf16 multiplication instructions, or None if unknown.

    Without these instructions, bf16 is emulated in fp32 with rounding, which is slower than fp32.
    """
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return None
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return bool(_BF16_FLAGS & {*lines[0].split()}) if lines else None


def store_weights_in_bf16(model: "Model") -> int:
    """Convert the large weights of an uncompiled model to bf16.

    An open model keeps its original weights in addition to those that OpenVINO prepares for its kernels. In
    fp32, the originals took a fifth of a server's memory (docs/performance.md). Values are rounded to the
    nearest bf16, as the `bf16` hint would round them anyway.

    Returns:
        The number of converted weights.
    """
    from openvino import Tensor, Type  # noqa: PLC0415 - optional dependency
    from openvino.op import Constant  # noqa: PLC0415
    from openvino.opset13 import convert  # noqa: PLC0415

    weights = [*_large_weights(model)]
    for weight in weights:
        rounded = Tensor(to_bf16(weight.data), weight.shape, Type.bf16)
        constant = Constant(rounded, shared_memory=False)
        converted = convert(constant, "f32")
        converted.get_rt_info()[_DECOMPRESSION] = ""
        for target in weight.output(0).get_target_inputs():
            target.replace_source_output(converted.output(0))
    return len(weights)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite values to the nearest bf16, ties to even, and return the bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def _large_weights(model: "Model") -> Iterator["Node"]:
    """Yield large constants whose only uses are as matrix multiplication weights or token embeddings."""
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type().get_type_name() != "f32":
            continue
        is_large = len(node.shape) > 1 and int(np.prod(node.shape)) >= MIN_BF16_ELEMENTS
        users = [target.get_node() for target in node.output(0).get_target_inputs()]
        if is_large and users and all(map(_uses_as_weight, users)):
            yield node


def _uses_as_weight(user: "Node") -> bool:
    kind: str = user.get_type_name()
    if kind != "Gather":
        return kind == "MatMul"
    ids = user.input_value(1).get_node()
    if ids.get_type_name() == "Convert":
        ids = ids.input_value(0).get_node()
    source: str = ids.get_type_name()
    return source == "Parameter"
