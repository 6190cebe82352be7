"""Reads the parameters of a layer. D hidden size, H heads, G key heads, K head size."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnlens_analysis.structure import read_proto
from attnlens_analysis.teach.numbers import Array

if TYPE_CHECKING:
    from onnx import TensorProto

_KINDS = {"attention": r"attention\.", "feed-forward": r"feed_forward\.", "norms": r".*norm"}


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of a layer.

    Attributes:
        counts: Number of parameters by kind: attention, feed-forward and norms.
        query: (D, H K) query projection. None if it is not stored in floating point.
        key: (D, G K) key projection, likewise.
        query_bias: (H K,), or None.
        key_bias: (G K,), or None.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    query: Array | None = None
    key: Array | None = None
    query_bias: Array | None = None
    key_bias: Array | None = None


def read_parameters(path: Path, layer: int) -> LayerParameters:
    """Read the parameters of a layer from a graph and its weights file."""
    from onnx import TensorProto  # noqa: PLC0415 - of the extra `export`

    prefix, counts, arrays = f"layers.{layer}.", dict.fromkeys(_KINDS, 0), {}
    fields = {
        f"attention.{role}.{part}": role if part != "bias" else f"{role}_bias"
        for role in ("query", "key")
        for part in ("weight.T", "bias")
    }
    for tensor in read_proto(path).graph.initializer:
        name = tensor.name.removeprefix(prefix)
        if name == tensor.name:
            continue
        for kind, pattern in _KINDS.items():
            if re.match(pattern, name):
                counts[kind] += int(np.prod(tensor.dims))
                break
        if name in fields and tensor.data_type in {TensorProto.FLOAT, TensorProto.FLOAT16}:
            arrays[fields[name]] = _read_tensor(path.parent, tensor).astype(np.float64)
    return LayerParameters(counts, **arrays)


def _read_tensor(directory: Path, tensor: "TensorProto") -> npt.NDArray[Any]:
    """Read a tensor. `onnx` would reject weights files with hard links, which `attnlens layout` creates."""
    from onnx import external_data_helper, helper, numpy_helper  # noqa: PLC0415 - of the extra `export`

    if not external_data_helper.uses_external_data(tensor):
        return numpy_helper.to_array(tensor)
    info = external_data_helper.ExternalDataInfo(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).newbyteorder("<")
    return np.memmap(directory / info.location, dtype, "r", info.offset or 0, tuple(tensor.dims))
