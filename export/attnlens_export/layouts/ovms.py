"""The tree that OpenVINO Model Server reads.

Sources, in the repository openvinotoolkit/model_server: docs/models_repository_classic.md (the tree),
docs/parameters.md (config.json; paths may be relative to it), src/schema.cpp (its keys),
src/modelinstance.cpp (the graph is the first file ending in .onnx that the directory lists, so there must be
one only).
"""

import json
from collections.abc import Sequence
from typing import Any

from attnlens.v1.manifest_pb2 import Precision
from attnlens_export.layouts.served_model import ServedModel, Tree


def ovms_tree(models: Sequence[ServedModel]) -> Tree:
    """Return `config.json` and `NAME/1/model.onnx` of each model."""
    config = {"model_config_list": [{"config": _config(model)} for model in models]}
    tree: Tree = {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
    for model in models:
        tree |= {f"{model.name}/1/{name}": content for name, content in model.files.items()}
    return tree


def _config(model: ServedModel) -> dict[str, Any]:
    config: dict[str, Any] = {"name": model.name, "base_path": model.name}
    if model.graph.precision == Precision.PRECISION_FP32:
        # OpenVINO computes in bf16 or fp16 where the processor has it, which is not what parity measured.
        config["plugin_config"] = {"INFERENCE_PRECISION_HINT": "f32"}
    return config
