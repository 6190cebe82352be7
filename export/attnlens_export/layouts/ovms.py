"""Directory tree of an OpenVINO Model Server repository.

Sources, in the repository openvinotoolkit/model_server: docs/models_repository_classic.md (tree),
docs/parameters.md (config.json, whose paths may be relative to it), src/schema.cpp (keys of config.json) and
src/modelinstance.cpp (the graph is the first *.onnx file in the directory, so there must be exactly one).
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
        # By default, OpenVINO computes in bf16 or fp16 if the processor supports it, unlike in the parity
        # check.
        config["plugin_config"] = {"INFERENCE_PRECISION_HINT": "f32"}
    return config
