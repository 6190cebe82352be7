"""Is a bundle still what its manifest says? Hashes first, then the graphs' form, then parity all over again.

Without the checkpoint the reference is rebuilt from the weights inside the ONNX file: that shows that the
graphs compute what the PyTorch encoder computes with those weights. With the checkpoint it also shows that
they are the checkpoint's weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from attnlens.bundle import read_manifest, verify_files
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.bundle import Progress, check_graphs, no_progress
from attnlens_export.errors import GraphError, SourceError
from attnlens_export.grid import Case, full_grid
from attnlens_export.manifest import EMBEDDINGS_PATH, GRAPH_KINDS
from attnlens_export.parity import measure_parity
from attnlens_export.result import ParityResult
from attnlens_export.simplify import TRANSPOSED_SUFFIX
from attnlens_model import Encoder, EncoderConfig, load_checkpoint, read_config


@dataclass(frozen=True)
class CheckSummary:
    """A bundle that was checked.

    Attributes:
        manifest: its manifest; every file has the hash that stands there.
        parity: the new measurements, which may have failed.
    """

    manifest: Manifest
    parity: ParityResult


def check_bundle(
    directory: Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    grid: Sequence[Case] | None = None,
    progress: Progress = no_progress,
) -> CheckSummary:
    """Check a bundle.

    Args:
        directory: the bundle.
        source: the checkpoint to compare with; None: the weights inside the bundle.
        revision: branch, tag or commit of `source` on the hub.
        grid: the parity cases; None: `full_grid`.
        progress: called before each step.

    Returns:
        The measurements; failed parity is reported there, not raised.

    Raises:
        BundleError: a file is missing or altered.
        GraphError: a graph is not valid ONNX, or a parameter of the encoder is not in it.
        LintError: a graph is not portable.
        ModelError: `source` can't be loaded.
        SourceError: `source` is an encoder of other sizes.
    """
    progress("Comparing the hashes", 0, 1)
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    config = read_config(directory / "config.json")
    check_graphs(directory, config)
    progress("Loading the weights", 0, 1)
    if source is None:
        encoder, name = rebuild_encoder(directory / EMBEDDINGS_PATH, config), "the weights inside the bundle"
    else:
        checkpoint = load_checkpoint(source, revision)
        if checkpoint.config != config:
            raise SourceError(f"{source} is another encoder: {checkpoint.config} instead of {config}")
        encoder, name = checkpoint.encoder, f"the checkpoint {checkpoint.source}"
    parity = measure_parity(
        encoder,
        config,
        directory,
        list(GRAPH_KINDS),
        grid or full_grid(config.max_tokens),
        reference_name=name,
        progress=lambda done, total, case: progress(f"Parity {case}", done, total),
    )
    return CheckSummary(manifest, parity)


def rebuild_encoder(path: Path, config: EncoderConfig) -> Encoder:
    """Make the PyTorch encoder, fp32 and in eval mode, from the weights of an ONNX file.

    Raises:
        GraphError: a parameter is missing or has another shape.
    """
    with torch.device("meta"):
        encoder = Encoder(config)
    tensors = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
    weights = {}
    for name, parameter in encoder.state_dict().items():
        if name in tensors:
            array = numpy_helper.to_array(tensors[name])
        elif name + TRANSPOSED_SUFFIX in tensors:
            array = numpy_helper.to_array(tensors[name + TRANSPOSED_SUFFIX]).T
        else:
            raise GraphError(f"{path} holds no weight for the parameter {name}")
        if array.shape != tuple(parameter.shape):
            raise GraphError(
                f"{path}: {name} has the shape {array.shape} instead of {tuple(parameter.shape)}"
            )
        weights[name] = torch.from_numpy(np.array(array, order="C"))
    encoder.load_state_dict(weights, assign=True)
    return encoder.eval()
