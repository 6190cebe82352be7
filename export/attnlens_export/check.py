"""Is a bundle still what its manifest says? Hashes and graphs, manifest, weights, then parity all over again.

Without the checkpoint the reference is rebuilt from the weights inside the ONNX file: that shows that the
graphs compute what the PyTorch encoder computes with those weights. With the checkpoint its weights are
compared with those of both graphs bit for bit: the grid reads a fraction of the embedding table only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attnlens.bundle import read_manifest, verify_files
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.claims import check_claims
from attnlens_export.contents import check_graphs, measure_graphs
from attnlens_export.errors import SourceError
from attnlens_export.graph.names import EMBEDDINGS_PATH, GRAPH_PURPOSES
from attnlens_export.graph.parameters import compare_weights, rebuild_encoder
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import Subject
from attnlens_export.precision import Stated
from attnlens_export.progress import Progress, no_progress
from attnlens_export.published.choices import with_choices_of
from attnlens_export.published.side_files import read_task
from attnlens_export.runtimes.measure import (
    RuntimeOptions,
    find_runtimes,
    measure_runtime,
)
from attnlens_export.runtimes.result import Missing, RuntimeResult
from attnlens_export.verdict import Verdict
from attnlens_model import Encoder, EncoderConfig, load_checkpoint, read_config


@dataclass(frozen=True)
class CheckSummary:
    """A bundle that was checked.

    Attributes:
        manifest: its manifest; every file has the hash that stands there.
        verdict: the new measurements, which may have failed.
        not_stated: the fields that the manifest does not state, which were not compared with the files.
        runtimes: those in other runtimes, each in its default precision and in fp32, which may have failed.
        missing: the runtimes that were to be measured if installed, and are not.
    """

    manifest: Manifest
    verdict: Verdict
    not_stated: tuple[str, ...] = ()
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
    others = runtimes or RuntimeOptions()
    installed, missing = find_runtimes(others)
    progress("Comparing the hashes", "", 0, 1)
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    config = read_config(directory / "config.json")
    check_graphs(directory, config)
    not_stated = check_claims(directory, manifest, config)
    progress("Loading the weights", "", 0, 1)
    encoder, name = _reference(directory, config, source, revision)
    for path in GRAPH_PURPOSES:
        compare_weights(directory / path, encoder, name)
    subject = Subject(directory, encoder, config, name, grid or default_grid(config, parity_tokens))
    beyond_grid = grid is None and parity_tokens is None
    verdict = measure_graphs(subject, _stated(manifest), progress, beyond_grid=beyond_grid)
    results = [
        result
        for runtime in installed
        for result in measure_runtime(subject, runtime, others.timeout_s, partial(progress, runtime.name))
    ]
    return CheckSummary(manifest, verdict, not_stated, tuple(results), tuple(missing))


def _reference(
    directory: Path, config: EncoderConfig, source: str | Path | None, revision: str | None
) -> tuple[Encoder, str]:
    """Return the encoder to compare with, and what to call it."""
    if source is None:
        return rebuild_encoder(directory / EMBEDDINGS_PATH, config), "the weights inside the bundle"
    chosen = partial(with_choices_of, config)
    checkpoint = load_checkpoint(source, revision, chosen, adapter_task=read_task(directory) or None)
    if checkpoint.config != config:
        raise SourceError(f"{source} is another encoder: {checkpoint.config} instead of {config}")
    return checkpoint.encoder, f"the checkpoint {checkpoint.source}"


def _stated(manifest: Manifest) -> dict[str, Stated]:
    """Return what the manifest says of each graph, by path."""
    return {
        graph.path: Stated(graph, tuple(gate for gate in manifest.parity.gates if gate.graph == graph.id))
        for graph in manifest.graphs
    }
