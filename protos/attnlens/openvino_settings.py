"""The properties that OpenVINO compiles a graph with, for the server and for what checks its numbers.

Pure functions of plain values: this knows no OpenVINO, whose documentation has the properties by these names.
"""

from typing import Final, Literal

OpenvinoPrecision = Literal["fp32", "bf16", "int8"]

PACKAGE: Final = "openvino"
"""The name of the engine, and of the package that it comes in."""

LENGTH_MULTIPLE = 16
"""Texts are padded to the next multiple of it, or to the last position of the model, and only texts of one
padded length share a batch. OpenVINO's softmax computes whole vectors of 16 keys one way and the rest
another, with other rounding: so a text gets the same bits whatever it is batched with."""

# What the products are computed in that the graph does not quantize itself.
_HINTS: dict[OpenvinoPrecision, str] = {"fp32": "f32", "bf16": "bf16", "int8": "f32"}


def inference_hint(precision: OpenvinoPrecision) -> str:
    """Return OpenVINO's name of the type that a graph computes in; in one in int8, what is not quantized."""
    return _HINTS[precision]


def compile_properties(
    device: str, precision: OpenvinoPrecision, *, threads: int, num_streams: int
) -> dict[str, str]:
    """Return the properties of a compiled graph.

    Args:
        device: OpenVINO's, for instance `CPU` or `GPU.1`.
        precision: of embeddings; attention and contributions are always compiled in `fp32`.
        threads: of all streams together, on a CPU.
        num_streams: batches that run side by side.
    """
    properties = {
        "INFERENCE_PRECISION_HINT": inference_hint(precision),
        "NUM_STREAMS": str(num_streams),
    }
    if device == "CPU":
        properties |= {
            "INFERENCE_NUM_THREADS": str(threads),
            # Threads that are bound to cores collide with other processes that are bound to the same ones.
            "ENABLE_CPU_PINNING": "NO",
            # By default, inputs of products whose weights are stored in 8 bits are rounded to 8 bits, too.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        }
    return properties
