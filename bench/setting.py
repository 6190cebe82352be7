"""The setting of a run: the model, its bundles, the texts, the threads, the durations."""

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
MAX_TOKENS = 512  # what both encoders take; texts are cut before, see workloads.py
OPEN_LOOP_SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)  # of what 64 clients in a closed loop get


@dataclass(frozen=True)
class Setting:
    """What all contestants get.

    Attributes:
        model: one of MODELS; on MiniLM there are servers, attention and single texts, too.
        bundle: for us, and for the peers that open bundles.
        int8_bundle: for our rows in int8: the same bundle, or another one if that has no int8 graph.
        strict_bundle: one whose int8 keeps a mean cosine of STRICT_COSINE; None: there are no such rows.
        checkpoint: for the peers that open PyTorch's weights.
        threads: of each process that computes; further cores are not used.
        repetitions: how often each row is measured, in turns.
        seconds: how long one measurement of a server takes.
        sizes: texts of each workload that is measured.
        open_loop_shares: the arrival rates, as shares of what 64 clients get.
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
        """The threads that our engine is given; 0, its default, if it may use every core."""
        return 0 if self.threads == os.cpu_count() else self.threads

    @cached_property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return read_manifest(self.bundle)

    @cached_property
    def corpus(self) -> Corpus:
        """Where the texts come from."""
        return Corpus(self.bundle)

    @cached_property
    def workloads(self) -> dict[str, Workload]:
        """The texts, by name."""
        return {name: getattr(self.corpus, name)(size) for name, size in self.sizes.items()}

    @cached_property
    def environment(self) -> dict[str, str]:
        """Variables that limit the threads of every library and keep all of them offline."""
        count = str(self.threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
        return dict.fromkeys(names, count) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}


FULL = {"passages": 200, "sentences": 500, "mixed": 300, "short": 200, "long": 32}
QUICK = {"passages": 40, "sentences": 96, "mixed": 64, "short": 40, "long": 6}
FULL_BASE, QUICK_BASE = {"passages": 32}, {"passages": 6}


def make_settings(
    models: Sequence[str], bundle: Path, threads: int, repetitions: int | None, *, quick: bool
) -> list[Setting]:
    """Pin this process and its children to `threads` cores; export the bundles that are absent."""
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        sys.exit(f"--threads {threads} is more than the {len(cores)} cores that there are")
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
    """Return the setting of all-MiniLM-L6-v2, with its own weights."""
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
    """Return the setting of an encoder of BERT-base's sizes with random weights."""
    checkpoint = make_base_checkpoint(find_checkpoint())
    if not BASE_BUNDLE.exists():
        export_with_int8(checkpoint, BASE_BUNDLE, BASE_NAME)
    return Setting(BASE, BASE_BUNDLE, BASE_BUNDLE, None, checkpoint, sizes=sizes, **common)


def default_output() -> Path:
    return DIRECTORY / "results"
