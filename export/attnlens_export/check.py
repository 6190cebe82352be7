"""Is a bundle still what its manifest says? Hashes and graphs, manifest, weights, then parity all over again.

Without the checkpoint the reference is rebuilt from the weights inside the ONNX file: that shows that the
graphs compute what the PyTorch encoder computes with those weights. With the checkpoint its weights are
compared with those of both graphs bit for bit: the grid reads a fraction of the embedding table only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from google.protobuf import json_format

from attnlens.bundle import MANIFEST_NAME, BundleError, find_graph, read_manifest, verify_files
from attnlens.v1.manifest_pb2 import Graph, GraphPurpose, Manifest, Precision
from attnlens_export.bundle import Progress, check_graphs, no_progress
from attnlens_export.errors import GraphError, SourceError
from attnlens_export.fp16.measure import measure_half
from attnlens_export.graph.names import EMBEDDINGS_PATH, GRAPH_PURPOSES
from attnlens_export.graph.read import external_files, read_structure, read_weight
from attnlens_export.graph.simplify import TRANSPOSED_SUFFIX
from attnlens_export.int8.quantize import measure_int8
from attnlens_export.int8.result import claimed_gate
from attnlens_export.manifest import (
    HALF_PATH,
    INT8_PATH,
    bundle_files,
    describe_architecture,
    describe_graphs,
    graph_purposes,
)
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import CaseProgress, measure_parity
from attnlens_export.parity.result import ParityResult
from attnlens_export.parity.runtimes import (
    Missing,
    RuntimeOptions,
    RuntimeParity,
    RuntimeResult,
    find_runtimes,
)
from attnlens_export.published.pooling import read_pooling
from attnlens_export.published.prompts import read_prompts
from attnlens_export.published.side_files import read_max_tokens
from attnlens_export.tokenizer.pairs import takes_pairs
from attnlens_model import Encoder, EncoderConfig, load_checkpoint, read_config

_LEFT_BY_OTHERS = (".DS_Store", "._*", ".git*", ".cache", "Thumbs.db", "desktop.ini")


@dataclass(frozen=True)
class CheckSummary:
    """A bundle that was checked.

    Attributes:
        manifest: its manifest; every file has the hash that stands there.
        parity: the new measurements, which may have failed.
        runtimes: those in other runtimes, each in its default precision and in fp32, which may have failed.
        missing: the runtimes that were to be measured if installed, and are not.
    """

    manifest: Manifest
    parity: ParityResult
    runtimes: tuple[RuntimeResult, ...] = ()
    missing: tuple[Missing, ...] = ()


def check_bundle(
    directory: Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    parity_tokens: int | None = None,
    grid: Sequence[Case] | None = None,
    runtimes: RuntimeOptions | None = None,
    progress: Progress = no_progress,
) -> CheckSummary:
    """Check a bundle.

    Args:
        directory: the bundle.
        source: the checkpoint to compare with; None: the weights inside the bundle.
        revision: branch, tag or commit of `source` on the hub.
        parity_tokens: the longest input that is compared; None: what memory allows, see `default_grid`.
        grid: the parity cases; None: `default_grid`.
        runtimes: in which other runtimes the cases run too; None: in none.
        progress: called before each step.

    Returns:
        The measurements; failed parity is reported there, not raised.

    Raises:
        BundleError: a file is missing, altered or not in the manifest, or the manifest says something else
            than the files.
        GraphError: a graph is not valid ONNX, or a parameter is not in it, or is not the checkpoint's or the
            other graph's.
        LintError: a graph is not portable.
        ModelError: `source` can't be loaded.
        SourceError: `source` is an encoder of other sizes.
        NotInstalledError, UnknownRuntimeError: a runtime was named that is not there.
    """
    installed, missing = find_runtimes(runtimes or RuntimeOptions())
    progress("Comparing the hashes", 0, 1)
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    config = read_config(directory / "config.json")
    check_graphs(directory, config)
    _check_claims(directory, manifest, config)
    progress("Loading the weights", 0, 1)
    if source is None:
        encoder, name = rebuild_encoder(directory / EMBEDDINGS_PATH, config), "the weights inside the bundle"
    else:
        checkpoint = load_checkpoint(source, revision)
        if checkpoint.config != config:
            raise SourceError(f"{source} is another encoder: {checkpoint.config} instead of {config}")
        encoder, name = checkpoint.encoder, f"the checkpoint {checkpoint.source}"
    for path in GRAPH_PURPOSES:
        _compare_weights(directory / path, encoder, name)
    cases = grid or default_grid(config, parity_tokens)
    parity = measure_parity(
        encoder,
        config,
        directory,
        list(GRAPH_PURPOSES),
        cases,
        reference_name=name,
        progress=_progress_of("Parity", progress),
    )
    if (directory / HALF_PATH).is_file():
        half = measure_half(encoder, config, directory, cases, progress=_progress_of("Parity", progress))
        parity = replace(parity, half=half)
    if (directory / INT8_PATH).is_file():
        progress("Int8 against fp32", 0, 1)
        claimed = find_graph(
            manifest, GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS, Precision.PRECISION_INT8
        ).quantization
        gate = claimed_gate(manifest)
        parity = replace(parity, int8=measure_int8(directory, config, gate, claimed.kinds))
    if runtimes is None:
        return CheckSummary(manifest, parity)
    elsewhere = RuntimeParity(encoder, config, directory, cases, name)
    results = [
        result
        for runtime in installed
        for result in elsewhere.measure(runtime, runtimes.timeout_s, _progress_of(runtime.name, progress))
    ]
    return CheckSummary(manifest, parity, tuple(results), tuple(missing))


def _progress_of(stage: str, progress: Progress) -> CaseProgress:
    return lambda done, total, case: progress(f"{stage} {case}", done, total)


def _check_claims(directory: Path, manifest: Manifest, config: EncoderConfig) -> None:
    """Compare what the manifest says with what an export would write of these files.

    Raises:
        BundleError: they differ.
    """
    listed = {directory / file.path for file in manifest.files}
    unlisted = [
        path
        for path in bundle_files(directory)
        if path not in listed and not _is_harmless(path.relative_to(directory))
    ]
    if unlisted:
        raise BundleError(f"{unlisted[0]} is not in the manifest: remove it, or export the bundle again")
    for graph in graph_purposes(directory):
        for path in external_files(directory / graph):
            if path not in listed:
                raise BundleError(
                    f"{directory / graph} has weights in {path}, which has no hash in the manifest: "
                    "export the bundle again"
                )
    claimed = Manifest(
        architecture=manifest.architecture,
        graphs=[_without_quantization(graph) for graph in manifest.graphs],
        pooling=manifest.pooling,
        max_tokens=manifest.max_tokens,
        text_pairs=manifest.text_pairs,
        prompts=manifest.prompts,
        default_prompt_name=manifest.default_prompt_name,
    )
    prompts = read_prompts(directory)
    expected = Manifest(
        architecture=describe_architecture(config),
        graphs=describe_graphs(directory),
        pooling=read_pooling(directory, config.hidden_size),
        max_tokens=read_max_tokens(directory, config),
        text_pairs=takes_pairs(directory, config),
        prompts=prompts.texts,
        default_prompt_name=prompts.default_name,
    )
    claims, facts = dict(_flatten(_as_dict(claimed))), dict(_flatten(_as_dict(expected)))
    for name in claims | facts:
        if claims.get(name) != facts.get(name):
            raise BundleError(
                f"{directory / MANIFEST_NAME}: {name} is {claims.get(name)!r}, the files say "
                f"{facts.get(name)!r}: export the bundle again"
            )


def _is_harmless(path: Path) -> bool:
    """Whether a file that nobody listed is one that file managers, git and hubs leave, and no tool loads."""
    return path == Path("README.md") or any(
        fnmatchcase(part, pattern) for part in path.parts for pattern in _LEFT_BY_OTHERS
    )


def _without_quantization(graph: Graph) -> Graph:
    """Return what follows from the file itself."""
    copied = Graph()
    copied.CopyFrom(graph)
    copied.ClearField("quantization")
    return copied


def _as_dict(message: Manifest) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, object]]:  # noqa: ANN401 - JSON values
    """Yield every single value by its path, such as `graphs.1.opset`."""
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _flatten(each, f"{name}.{key}" if name else str(key))


def _compare_weights(path: Path, encoder: Encoder, name: str) -> None:
    """Compare the weights of a graph with those of the reference, bit for bit.

    Raises:
        GraphError: a parameter differs, is missing, or has another shape.
    """
    parameters = encoder.state_dict()
    for parameter, array in _parameter_arrays(path, parameters):
        found, expected = torch.from_numpy(array), parameters[parameter]
        if not torch.equal(found, expected):
            index = [int(axis) for axis in (found != expected).nonzero()[0]]
            raise GraphError(
                f"{path}: {parameter}{index} is {float(found[tuple(index)]):.8g}, "
                f"{float(expected[tuple(index)]):.8g} in {name}"
            )


def rebuild_encoder(path: Path, config: EncoderConfig) -> Encoder:
    """Make the PyTorch encoder, fp32 and in eval mode, from the weights of an ONNX file.

    Weights that are not stored transposed stay in the file, which must not change as long as the encoder is
    used.

    Raises:
        GraphError: a parameter is missing, has another shape, or holds a NaN or an infinity.
    """
    with torch.device("meta"):
        encoder = Encoder(config)
    weights = {}
    for name, array in _parameter_arrays(path, encoder.state_dict()):
        if not np.isfinite(array).all():
            raise GraphError(f"{path}: {name} holds a NaN or an infinity")
        weights[name] = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    encoder.load_state_dict(weights, assign=True)
    return encoder.eval()


def _parameter_arrays(
    path: Path, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """Yield every parameter by name as the file holds it, mapped rather than read.

    Raises:
        GraphError: one is missing, or has another shape.
    """
    tensors = {tensor.name: tensor for tensor in read_structure(path).graph.initializer}
    for name, parameter in parameters.items():
        if name in tensors:
            array = read_weight(path.parent, tensors[name])
        elif name + TRANSPOSED_SUFFIX in tensors:
            array = read_weight(path.parent, tensors[name + TRANSPOSED_SUFFIX]).T
        else:
            raise GraphError(f"{path} holds no weight for the parameter {name}")
        if array.shape != tuple(parameter.shape):
            raise GraphError(
                f"{path}: {name} has the shape {array.shape} instead of {tuple(parameter.shape)}"
            )
        yield name, array
