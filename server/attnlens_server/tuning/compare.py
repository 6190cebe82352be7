"""Every engine in every precision, with the settings that a server has by default.

Each variant is opened anew for each round, and closed before the next one is opened. So no more memory is in
use than a server needs, however large the model, and a machine that is slow for a while is slow for all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

from attnlens_server.bundle import Bundle, open_bundle
from attnlens_server.bundle.manifest import PRECISIONS
from attnlens_server.config import DEFAULT_DEVICE, ConfigError, ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.errors import StartupError
from attnlens_server.tuning.probe import Probe, embedding_items, probe_apart
from attnlens_server.tuning.running import running
from attnlens_server.tuning.traffic import saturate
from attnlens_server.tuning.variants import REFERENCE, LeftOut, Measured, Turn, Variant, agreement
from attnlens_server.tuning.workload import Workload

ROUNDS = 3
SHORT_TOKENS = 16  # of the text that is alone
ALONE_SHARE = 0.2  # of the time of a round
MIN_ALONE = 5  # times

Progress = Callable[[str, int, int], None]
"""Gets what is being measured, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured of all variants.

    Attributes:
        sample: the texts of `Measured.accuracy`.
        alone_tokens: of the text of `Turn.alone_ms`.
        rows: the reference first.
        left_out: those that can't run here.
    """

    sample: Workload
    alone_tokens: int
    rows: tuple[Measured, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class Contender:
    """A variant that runs here, and what was measured of it so far."""

    variant: Variant
    probe: Probe
    turns: list[Turn]


class Rig(Protocol):
    """What measures one variant."""

    def probe(self, variant: Variant) -> Probe:
        """Return its embeddings and its memory.

        Raises:
            StartupError: it can't run here.
            ConfigError: there is no such variant.
        """

    def run(self, variant: Variant) -> Turn:
        """Return its speed in one round."""


def compare(
    variants: Sequence[Variant], rig: Rig, progress: Progress
) -> tuple[list[Contender], list[LeftOut]]:
    """Probe all variants, then run those that can run here in turn, ROUNDS times.

    Args:
        variants: the reference first.
        rig: measures them.
        progress: is told.

    Raises:
        StartupError: the reference can't run.
    """
    contenders: list[Contender] = []
    left_out: list[LeftOut] = []
    for done, variant in enumerate(variants):
        progress("engines: accuracy and memory", done, len(variants))
        try:
            contenders.append(Contender(variant, rig.probe(variant), []))
        except (StartupError, ConfigError) as error:
            if variant == REFERENCE:
                raise
            left_out.append(LeftOut(variant, str(error)))
    for number in range(ROUNDS):
        for done, contender in enumerate(contenders):
            progress(f"engines: speed, round {number + 1} of {ROUNDS}", done, len(contenders))
            contender.turns.append(rig.run(contender.variant))
    return contenders, left_out


def compare_engines(variants: Sequence[Variant], rig: "EngineRig", progress: Progress) -> Comparison:
    """Measure variants, the reference first; see `compare`."""
    contenders, left_out = compare(variants, rig, progress)
    reference = contenders[0].probe.embeddings
    rows = tuple(
        Measured(
            contender.variant,
            tuple(contender.turns),
            agreement(contender.probe.embeddings, reference),
            contender.probe.memory_bytes,
            rig.is_checked(contender.variant),
        )
        for contender in contenders
    )
    return Comparison(rig.sample, len(rig.short_text), rows, tuple(left_out))


def config_of(config: ServerConfig, variant: Variant) -> ServerConfig:
    """Return the configuration of a server with this engine and precision.

    Where to run is taken from `config` only if that is for the same engine.

    Raises:
        ConfigError: the engine does not compute in this precision.
    """
    changes: dict[str, Any] = {"engine": variant.engine, "precision": variant.precision}
    if variant.engine != config.engine:
        changes |= {"provider": "auto", "device_id": 0, "device": DEFAULT_DEVICE}
    return replace(config, **changes)


class EngineRig:
    """Measures real engines. See `Rig`."""

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        workload: Workload,
        sample: Workload,
        *,
        num_in_flight: int,
        seconds: float,
    ) -> None:
        """Prepare.

        Args:
            bundle: the model, opened in any precision.
            config: of a server; engine and precision are those of each variant.
            workload: texts to measure the speed with.
            sample: texts to compare the embeddings of.
            num_in_flight: texts that wait or run at a time.
            seconds: for a turn.
        """
        self.sample = sample
        self.short_text = workload.nearest(SHORT_TOKENS)
        self._bundle = bundle
        self._config = config
        self._workload = workload
        self._num_in_flight = num_in_flight
        self._seconds = seconds
        self._opened: dict[Variant, tuple[Bundle, ServerConfig]] = {}

    def probe(self, variant: Variant) -> Probe:
        """Return its embeddings of the sample, and its memory after it."""
        config = config_of(self._config, variant)
        bundle = open_bundle(self._bundle.directory, variant.precision)
        self._opened[variant] = (bundle, config)
        return probe_apart(bundle, config, self.sample.input_ids)

    def run(self, variant: Variant) -> Turn:
        """Return its speed with many texts, then with one that is alone."""
        bundle, config = self._opened[variant]
        [item] = embedding_items(bundle, [self.short_text])
        with running(bundle, config) as engine:
            flow = saturate(
                engine.lanes["embeddings"],
                self._workload,
                item.wanted,
                num_lanes=engine.num_lanes,
                num_in_flight=self._num_in_flight,
                seconds=self._seconds,
            )
            return Turn(engine.runtime.device, flow.tokens_per_s, self._time_alone(engine, bundle))

    def is_checked(self, variant: Variant) -> bool:
        """Return whether the bundle says that its graphs were compared with PyTorch as they run here."""
        _, config = self._opened[variant]
        checked = {
            (check.engine, check.precision, check.device) for check in self._bundle.manifest.engine_checks
        }
        wanted = (variant.engine, PRECISIONS[variant.precision], config.device)
        return variant.engine == REFERENCE.engine or wanted in checked  # parity is of ONNX Runtime

    def _time_alone(self, engine: Engine, bundle: Bundle) -> float:
        durations_ms: list[float] = []
        ends = time.monotonic() + ALONE_SHARE * self._seconds
        while len(durations_ms) <= MIN_ALONE or time.monotonic() < ends:
            begin = time.perf_counter()
            [future] = engine.submit(list(embedding_items(bundle, [self.short_text])), kind="embeddings")
            future.result()
            durations_ms.append(1000 * (time.perf_counter() - begin))
        return median(durations_ms[1:])  # the first one waits for texts of before
