"""Every engine in every precision, with the settings that a server has by default.

Variants run in turn, in several rounds, so that a machine that is slow for a while is slow for all. Between
their turns they stay open where memory has room for all of them, since an engine is slower until it has seen
the usual shapes of batches. Where it has no room, one is open at a time, and is warmed up in each turn.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import Any, Protocol, Self

from attnlens.v1.manifest_pb2 import EngineCheck
from attnlens_server.bundle import Bundle, open_bundle
from attnlens_server.bundle.engine_checks import find_engine_check
from attnlens_server.config import DEFAULT_DEVICE, ConfigError, ServerConfig
from attnlens_server.engine import Engine, Item
from attnlens_server.errors import StartupError
from attnlens_server.tuning.memory import available_bytes
from attnlens_server.tuning.probe import Probe, embedding_item, probe_apart
from attnlens_server.tuning.running import running
from attnlens_server.tuning.traffic import Flow, saturate
from attnlens_server.tuning.variants import REFERENCE, LeftOut, Measured, Turn, Variant, agreement
from attnlens_server.tuning.workload import Workload

ROUNDS = 3
SHORT_TOKENS = 16  # of the text that is alone
ALONE_SHARE = 0.2  # of the time of a round
MIN_ALONE = 5  # times
MEMORY_SHARE = 0.5  # of what is available, for all variants at a time

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
    """What measures one variant at a time."""

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
    with rig:
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


def has_room_for(memory_bytes: Sequence[int | None], available: int | None) -> bool:
    """Return whether processes that take so much may be open at a time; not where something is not known."""
    known = [size for size in memory_bytes if size is not None]
    return (
        available is not None and len(known) == len(memory_bytes) and sum(known) <= MEMORY_SHARE * available
    )


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
    """Measures real engines, which the end of a `with` block closes. See `Rig`."""

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
        self._bundles: dict[Variant, Bundle] = {}
        self._memory_bytes: list[int | None] = []  # of each variant that can run
        self._resources = ExitStack()
        self._open: dict[Variant, Engine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._resources.close()

    def probe(self, variant: Variant) -> Probe:
        """Return its embeddings of the sample, and its memory after it."""
        config = config_of(self._config, variant)
        bundle = open_bundle(self._bundle.directory, variant.precision)
        check = self._find_check(variant)
        if check is not None and not check.passed:  # a server refuses it
            raise StartupError(
                f"it did not pass `attnlens check {bundle.directory} --engine {variant.engine}`"
            )
        probe = probe_apart(bundle, config, self.sample.input_ids)
        self._bundles[variant] = bundle
        self._memory_bytes.append(probe.memory_bytes)
        return probe

    def run(self, variant: Variant) -> Turn:
        """Return its speed with many texts, then with one that is alone."""
        with ExitStack() as turn:
            engine = self._open.get(variant)
            if engine is None:
                keep = has_room_for(self._memory_bytes, available_bytes())
                resources = self._resources if keep else turn
                engine = resources.enter_context(
                    running(self._bundles[variant], config_of(self._config, variant))
                )
                self._saturate(engine)  # to warm up
                if keep:
                    self._open[variant] = engine
            flow = self._saturate(engine)
            return Turn(engine.runtime.device, flow.tokens_per_s, self._time_alone(engine))

    def is_checked(self, variant: Variant) -> bool:
        """Return whether the bundle says that its graphs were compared with PyTorch as they run here."""
        # Parity, which every bundle has, is of ONNX Runtime.
        return variant.engine == REFERENCE.engine or self._find_check(variant) is not None

    def _find_check(self, variant: Variant) -> EngineCheck | None:
        device = config_of(self._config, variant).device
        return find_engine_check(self._bundle.manifest, variant.engine, variant.precision, device)

    def _saturate(self, engine: Engine) -> Flow:
        return saturate(
            engine.lanes["embeddings"],
            self._workload,
            self._short_item().wanted,
            num_lanes=engine.num_lanes,
            num_in_flight=self._num_in_flight,
            seconds=self._seconds,
        )

    def _short_item(self) -> Item:
        return embedding_item(self._bundle, self.short_text)

    def _time_alone(self, engine: Engine) -> float:
        durations_ms: list[float] = []
        ends = time.monotonic() + ALONE_SHARE * self._seconds
        while len(durations_ms) <= MIN_ALONE or time.monotonic() < ends:
            begin = time.perf_counter()
            [future] = engine.submit([self._short_item()], kind="embeddings")
            future.result()
            durations_ms.append(1000 * (time.perf_counter() - begin))
        return median(durations_ms[1:])  # the first one waits for texts of before
