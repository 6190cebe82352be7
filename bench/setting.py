"""Benchmark settings: model, bundles, texts, threads and durations."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import Manifest
from bench.cases import MINILM
from bench.made.bundles import (
    BASE_BUNDLE,
    INT8_BUNDLE,
    STRICT_BUNDLE,
    STRICT_COSINE,
    export_with_int8,
    find_checkpoint,
    find_int8_bundle,
)
from bench.made.checkpoint import make_base_checkpoint
from bench.made.environments import DIRECTORY
from bench.workloads import Corpus, Workload

BASE = "BERT-base sizes"
MODELS = {"minilm": MINILM, "base": BASE}
MINILM_NAME, BASE_NAME = "all-MiniLM-L6-v2", "random weights in BERT-base's sizes"
MAX_TOKENS = 512  # limit of both encoders; texts are truncated in workloads.py
OPEN_LOOP_SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of the closed-loop throughput with 64 clients


@dataclass(frozen=True)
class Setting:
    """Settings shared by all contestants.

    Attributes:
        model: Value of MODELS. Servers, attention and single texts are only measured with MiniLM.
        bundle: Bundle for attnlens and for peers that load ONNX models.
        int8_bundle: Bundle with an int8 graph. May be the same as `bundle`.
        strict_bundle: Bundle whose int8 graph has a mean cosine of at least STRICT_COSINE. If None, its rows
            are omitted.
        checkpoint: Checkpoint for peers that load PyTorch weights.
        threads: Threads per process, and number of cores in use.
        repetitions: Interleaved measurements per row.
        seconds: Duration of one server measurement.
        sizes: Number of texts per workload.
        open_loop_shares: Arrival rates as fractions of the closed-loop throughput with 64 clients.
    """

    model: str
    bundle: Path
    int8_bundle: Path
    strict_bundle: Path | None
    checkpoint: Path
    threads: int
    repetitions: int
    seconds: float
    sizes: dict[str, int]
    open_loop_shares: tuple[float, ...]

    @property
    def our_threads(self) -> int:
        """Thread setting of the attnlens engine: 0, its default, if all cores are used."""
        return 0 if self.threads == os.cpu_count() else self.threads

    @cached_property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return read_manifest(self.bundle)

    @cached_property
    def corpus(self) -> Corpus:
        """Source of the texts."""
        return Corpus(self.bundle)

    @cached_property
    def workloads(self) -> dict[str, Workload]:
        """Workloads by name."""
        return {name: getattr(self.corpus, name)(size) for name, size in self.sizes.items()}

    @cached_property
    def environment(self) -> dict[str, str]:
        """Environment variables that limit threads and disable downloads."""
        count = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
        return dict.fromkeys(names, count) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}


FULL = {"passages": 200, "sentences": 500, "mixed": 300, "short": 200, "long": 32}
QUICK = {"passages": 40, "sentences": 96, "mixed": 64, "short": 40, "long": 6}
FULL_BASE, QUICK_BASE = {"passages": 32}, {"passages": 6}


def make_settings(
    models: Sequence[str], bundle: Path, threads: int, repetitions: int | None, *, quick: bool
) -> list[Setting]:
    """Pin this process and its children to `threads` cores and export missing bundles."""
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        sys.exit(f"--threads {threads} exceeds the {len(cores)} available cores")
    os.sched_setaffinity(0, cores[: threads or len(cores)])
    makers: dict[str, Callable[..., Setting]] = {
        "minilm": partial(minilm_setting, bundle, FULL if not quick else QUICK),
        "base": partial(base_setting, FULL_BASE if not quick else QUICK_BASE),
    }
    return [
        makers[model](
            threads=threads or len(cores),
            repetitions=repetitions or (2 if quick else 3),
            seconds=0.7 if quick else 2.5,
            open_loop_shares=OPEN_LOOP_SHARES[1::2] if quick else OPEN_LOOP_SHARES,
        )
        for model in models
    ]


def minilm_setting(bundle: Path, sizes: dict[str, int], **common: Any) -> Setting:  # noqa: ANN401
    """Return the setting for all-MiniLM-L6-v2."""
    checkpoint = find_checkpoint()
    export = partial(export_with_int8, checkpoint, name=MINILM_NAME)
    if not bundle.exists():
        export(bundle)
    if not STRICT_BUNDLE.exists():
        export(STRICT_BUNDLE, min_mean_cosine=STRICT_COSINE)
    return Setting(
        model=MINILM,
        bundle=bundle.resolve(),
        int8_bundle=find_int8_bundle(bundle, INT8_BUNDLE, export).resolve(),
        strict_bundle=STRICT_BUNDLE,
        checkpoint=checkpoint,
        sizes=sizes,
        **common,
    )


def base_setting(sizes: dict[str, int], **common: Any) -> Setting:  # noqa: ANN401
    """Return the setting for a randomly initialized encoder with the dimensions of BERT-base."""
    checkpoint = make_base_checkpoint(find_checkpoint())
    if not BASE_BUNDLE.exists():
        export_with_int8(checkpoint, BASE_BUNDLE, BASE_NAME)
    return Setting(BASE, BASE_BUNDLE, BASE_BUNDLE, None, checkpoint, sizes=sizes, **common)


def default_output() -> Path:
    return DIRECTORY / "results"
