"""Directory tree of a Triton Inference Server repository.

Sources, in the repository triton-inference-server/server: docs/user_guide/model_repository.md (tree; an ONNX
model of several files is a directory `model.onnx` that contains `model.onnx`), model_configuration.md
(config.pbtxt) and ragged_batching.md (requests that the dynamic batcher combines).
"""

from collections.abc import Sequence

from attnlens.v1.manifest_pb2 import Precision, ValueInfo
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export.layouts.served_model import GRAPH_NAME, ServedModel, Tree

_DATA_TYPES = {
    DataType.DATA_TYPE_FLOAT32: "TYPE_FP32",
    DataType.DATA_TYPE_FLOAT16: "TYPE_FP16",
    DataType.DATA_TYPE_INT64: "TYPE_INT64",
}

_BATCHING = """\
# -1 is a dynamic axis; the comment shows its name. max_batch_size 0 means that dims include the batch axis
# and that each request runs as a batch of its own, padded by the client. Triton combines only requests of
# equal shape. If your clients pad to few lengths, enable this: set max_batch_size, remove the first entry of
# all dims, and add `dynamic_batching { }`.
"""
_HALF_PRECISION = """\
# This model computes in fp16, which is meant for GPUs. By default, Triton uses a GPU if there is one. With
# `instance_group [ { kind: KIND_GPU } ]`, it requires one.
"""


def triton_tree(models: Sequence[ServedModel]) -> Tree:
    """Return `NAME/config.pbtxt` and `NAME/1/model.onnx` of each model."""
    tree: Tree = {}
    for model in models:
        tree[f"{model.name}/config.pbtxt"] = _config(model).encode()
        version = f"{model.name}/1"
        folder = version if len(model.files) == 1 else f"{version}/{GRAPH_NAME}"
        tree |= {f"{folder}/{name}": content for name, content in model.files.items()}
    return tree


def _config(model: ServedModel) -> str:
    outputs = [output.value for output in model.graph.outputs]
    half_precision = model.graph.precision == Precision.PRECISION_FP16
    return (
        f"{_BATCHING}{_HALF_PRECISION if half_precision else ''}"
        f'name: "{model.name}"\n'
        'backend: "onnxruntime"\n'
        "max_batch_size: 0\n"
        f"{_values('input', model.graph.inputs)}{_values('output', outputs)}"
    )


def _values(field: str, values: Sequence[ValueInfo]) -> str:
    return "".join(
        f"{field} {{\n"
        f'  name: "{value.name}"\n'
        f"  data_type: {_DATA_TYPES[value.data_type]}\n"
        f"  dims: [ {', '.join(_dim(axis) for axis in value.axes)} ]  # {', '.join(value.axes)}\n"
        "}\n"
        for value in values
    )


def _dim(axis: str) -> str:
    return axis if axis.isdecimal() else "-1"
