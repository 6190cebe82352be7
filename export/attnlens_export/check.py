"""Checks an existing bundle: verifies hashes, graphs, manifest and weights, then repeats the measurements.

Without the checkpoint, the reference is rebuilt from the weights in the ONNX file. This shows that the graphs
produce the same results as the PyTorch encoder with these weights. With the checkpoint, its weights are also
compared bit for bit with those of both graphs, because the parity grid covers only part of the embedding
table, and the manifest with the checkpoint's settings and with embedding ranges that are measured again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from attnlens.bundle import read_manifest, verify_files
from attnlens.short_repr import short_repr
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.claims import check_claims
from attnlens_export.contents import Verdict, check_graphs, graph_purposes, measure_graphs
from attnlens_export.errors import SourceError
from attnlens_export.graph.names import embeddings_path
from attnlens_export.graph.parameters import compare_weights, rebuild_encoder
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import Subject
from attnlens_export.parity.stored import References
from attnlens_export.precision import Stated
from attnlens_export.progress import Progress, no_progress
from attnlens_export.published.choices import with_choices_of
from attnlens_export.published.side_files import read_task
from attnlens_export.restated import Published, compare_source, compare_versions
from attnlens_export.runtimes import (
    Missing,
    RuntimeOptions,
    RuntimeResult,
    find_runtimes,
    measure_runtime,
)
from attnlens_model import (
    Encoder,
    EncoderConfig,
    ModuleEncoder,
    load_checkpoint,
    open_checkpoint,
    read_config,
)


@short_repr
@dataclass(frozen=True)
class CheckSummary:
    """Result of a check.

    Attributes:
        manifest: Manifest of the bundle. The hashes of all files match.
        verdict: New measurements, whether or not they passed.
        not_stated: Fields missing from the manifest, which were not compared with the files.
        runtimes: Results in other runtimes, in the default precision and in fp32, whether or not they passed.
        missing: Runtimes that are not installed.
        differences: With the checkpoint: fields of the manifest that differ from it, or from new
            measurements, with both values.
        other_versions: With the checkpoint: versions other than those that the manifest states.
    """

    manifest: Manifest
    verdict: Verdict
    not_stated: tuple[str, ...] = ()
    runtimes: tuple[RuntimeResult, ...] = ()
    missing: tuple[Missing, ...] = ()
    differences: tuple[str, ...] = ()
    other_versions: tuple[str, ...] = ()

    def __repr__(self) -> str:
        names = ("not_stated", "runtimes", "missing", "differences", "other_versions")
        counts = {name: len(getattr(self, name)) for name in names}
        parts = [f"{number} {name.replace('_', ' ')}" for name, number in counts.items()]
        return f"CheckSummary({self.manifest.model_name!r}, {self.verdict!r}, {', '.join(parts)})"


def check_bundle(
    directory: Path,
    source: str | Path | nn.Module | None = None,
    *,
    revision: str | None = None,
    parity_tokens: int | None = None,
    grid: Sequence[Case] | None = None,
    runtimes: RuntimeOptions | None = None,
    progress: Progress = no_progress,
) -> CheckSummary:
    """Check a bundle.

    Args:
        directory: Bundle directory.
        source: Checkpoint to compare with. If None, the weights inside the bundle.
        revision: Branch, tag or commit of `source` on the hub.
        parity_tokens: Maximum input length in the grid. If None, the memory limits of `default_grid` apply.
        grid: Parity cases. If None, `default_grid`.
        runtimes: Other runtimes in which to run the grid. If None, no other runtimes are used.
        progress: Called before each step.

    Returns:
        The measurements. A parity failure or a difference does not raise an exception.

    Raises:
        BundleError: A file is missing, changed or not listed, or the manifest contradicts the files.
        GraphError: A graph is not valid ONNX, lacks a parameter, or has different weights from the checkpoint
            or the other graph. LintError: A graph is not portable. ModelError: `source` can't be loaded.
            SourceError: `source` has a different configuration. NotInstalledError: A requested runtime is not
            installed. UnknownRuntimeError: A requested runtime does not exist.
    """
    options = runtimes or RuntimeOptions()
    installed, missing = find_runtimes(options)
    progress("Comparing the hashes", "", 0, 1)
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    config = read_config(directory / "config.json")
    check_graphs(directory, config)
    not_stated = check_claims(directory, manifest, config)
    progress("Loading the weights", "", 0, 1)
    encoder, name, published = _load_reference(directory, config, source, revision)
    for path in graph_purposes(directory):
        compare_weights(directory / path, encoder, name)
    references = References(encoder, is_owned=not isinstance(source, nn.Module))
    subject = Subject(directory, references, config, name, grid or default_grid(config, parity_tokens))
    beyond_grid = grid is None and parity_tokens is None
    verdict = measure_graphs(subject, _stated(manifest), progress, beyond_grid=beyond_grid)
    results = [
        result
        for runtime in installed
        for result in measure_runtime(subject, runtime, options.timeout_s, partial(progress, runtime.name))
    ]
    differences: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    if source is not None:
        stage = partial(progress, "Embedding ranges")
        differences = tuple(compare_source(directory, manifest, config, published, stage))
        versions = tuple(compare_versions(manifest, published))
    return CheckSummary(manifest, verdict, not_stated, tuple(results), tuple(missing), differences, versions)


class _Reference(NamedTuple):
    """What a bundle is compared with.

    Attributes:
        encoder: Encoder.
        name: Description of its weights.
        published: Fields of the manifest that the checkpoint determines. None without a checkpoint.
    """

    encoder: Encoder | ModuleEncoder
    name: str
    published: Published | None = None


def _load_reference(
    directory: Path, config: EncoderConfig, source: str | Path | nn.Module | None, revision: str | None
) -> _Reference:
    if config.has_own_module and not config.is_published_module:
        if not isinstance(source, nn.Module):
            raise SourceError(
                "the bundle was exported from a PyTorch module of your own: pass it in Python, "
                "attnlens_export.check_bundle(directory, module)"
            )
        # Only the export needs the name of the embeddings.
        encoder = ModuleEncoder(source, config, embeddings="")
        return _Reference(encoder, f"the module {type(source).__name__}")
    if isinstance(source, nn.Module):
        raise SourceError("the bundle was exported from a checkpoint: pass its directory instead of a module")
    if source is None:
        rebuilt = rebuild_encoder(directory / embeddings_path(directory), config)
        return _Reference(rebuilt, "the weights inside the bundle")
    chosen = partial(with_choices_of, config)
    with open_checkpoint(source, revision) as opened:
        checkpoint = load_checkpoint(opened, change=chosen, adapter_task=read_task(directory) or None)
        published = Published.read(opened, config)
    if checkpoint.config != config:
        raise SourceError(
            f"the configuration of {source} is {checkpoint.config}, but that of the bundle is {config}: "
            "specify the checkpoint that the bundle was exported from"
        )
    return _Reference(checkpoint.encoder, f"the checkpoint {checkpoint.source}", published)


def _stated(manifest: Manifest) -> dict[str, Stated]:
    """Return the manifest's entry and gates for each graph, by path."""
    return {
        graph.path: Stated(graph, tuple(gate for gate in manifest.parity.gates if gate.graph == graph.id))
        for graph in manifest.graphs
    }
