"""Every engine in every precision, with the settings that a server has by default.

Each variant is opened anew for each round, and closed before the next one is opened. So no more memory is in
use than a server needs, however large the model, and a machine that is slow for a while is slow for all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from attnlens_server.bundle import Bundle, open_bundle
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.errors import StartupError
from attnlens_server.tuning.probe import Probe, embedding_items, probe_apart
from attnlens_server.tuning.running import running
from attnlens_server.tuning.traffic import saturate
from attnlens_server.tuning.variants import (
    REFERENCE,
    Accuracy,
    Measured,
    Variant,
    agreement,
)
from attnlens_server.tuning.workload import Workload

ROUNDS = 3
SHORT_TOKENS = 16  # of the text that is alone
ALONE_SHARE = 0.2  # of the time of a round
MIN_ALONE = 5  # times

Progress = Callable[[str, int, int], None]
"""Gets what is being measured, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A variant that can't run here."""

    variant: Variant
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured of all variants.

    Attributes:
        sample: the texts of `Measured.accuracy`.
        alone_tokens: of the text of `Measured.alone_ms`.
        rows: the reference first.
        left_out: those that can't run here.
    """

    sample: Workload
    alone_tokens: int
    rows: tuple[Measured, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class _Runner:
    """A variant that runs here, and what is measured of it in each round."""

    variant: Variant
    bundle: Bundle
    config: ServerConfig
    probe: Probe
    turns: list["_Turn"]


@dataclass(frozen=True, slots=True)
class _Turn:
    provider: str
    tokens_per_s: float
    alone_ms: float


def config_of(config: ServerConfig, variant: Variant) -> ServerConfig:
    """Return the configuration of a server with this engine and precision.

    Where to run is taken from `config` only if that is for the same engine.

    Raises:
        ConfigError: the engine does not compute in this precision.
    """
    elsewhere = {} if variant.engine == config.engine else {"provider": "auto", "device": "CPU"}
    return replace(config, engine=variant.engine, precision=variant.precision, **elsewhere)


class Comparer:
    """Measures all variants with the same texts."""

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        workload: Workload,
        sample: Workload,
        *,
        seconds: float,
        num_in_flight: int,
        progress: Progress,
    ) -> None:
        """Prepare.

        Args:
            bundle: the model, opened in any precision.
            config: of a server; engine and precision are what is varied.
            workload: texts to measure the speed with.
            sample: texts to compare the embeddings of.
            seconds: for a variant, in each round.
            num_in_flight: texts that wait or run at a time.
            progress: is told.
        """
        self._bundle = bundle
        self._config = config
        self._workload = workload
        self._sample = sample
        self._seconds = seconds
        self._num_in_flight = num_in_flight
        self._progress = progress
        self._short_text = workload.nearest(SHORT_TOKENS)

    def compare(self, variants: list[Variant]) -> Comparison:
        """Measure variants, of which the first is the reference.

        Raises:
            StartupError: the reference can't run.
        """
        runners, left_out = self._probe(variants)
        for number in range(ROUNDS):
            stage = f"engines, round {number + 1} of {ROUNDS}"
            for done, runner in enumerate(runners):
                self._progress(stage, done, len(runners))
                runner.turns.append(self._turn(runner))
        rows = tuple(self._row(runner, runners[0].probe) for runner in runners)
        return Comparison(self._sample, len(self._short_text), rows, tuple(left_out))

    def _probe(self, variants: list[Variant]) -> tuple[list[_Runner], list[LeftOut]]:
        """Find out which variants run, and what their embeddings and their memory are."""
        runners, left_out = [], []
        for done, variant in enumerate(variants):
            self._progress("engines, accuracy and memory", done, len(variants))
            try:
                config = config_of(self._config, variant)
                bundle = open_bundle(self._bundle.directory, variant.precision)
                probe = probe_apart(bundle, config, self._sample.input_ids)
            except (StartupError, ConfigError) as error:
                if variant == REFERENCE:
                    raise
                left_out.append(LeftOut(variant, str(error)))
            else:
                runners.append(_Runner(variant, bundle, config, probe, []))
        return runners, left_out

    def _turn(self, runner: _Runner) -> _Turn:
        with running(runner.bundle, runner.config) as engine:
            flow = saturate(
                engine.lanes["embeddings"],
                self._workload,
                next(embedding_items(runner.bundle, [self._short_text])).wanted,
                num_lanes=engine.num_lanes,
                num_in_flight=self._num_in_flight,
                seconds=self._seconds,
            )
            alone_ms = self._time_alone(engine, runner.bundle)
            return _Turn(engine.provider, flow.tokens_per_s, alone_ms)

    def _time_alone(self, engine: Engine, bundle: Bundle) -> float:
        durations_ms: list[float] = []
        ends = time.monotonic() + ALONE_SHARE * self._seconds
        while len(durations_ms) <= MIN_ALONE or time.monotonic() < ends:
            begin = time.perf_counter()
            [future] = engine.submit(list(embedding_items(bundle, [self._short_text])), kind="embeddings")
            future.result()
            durations_ms.append(1000 * (time.perf_counter() - begin))
        return median(durations_ms[1:])  # the first run waits for texts of before

    def _row(self, runner: _Runner, reference: Probe) -> Measured:
        is_reference = runner.variant == REFERENCE
        return Measured(
            runner.variant,
            runner.turns[0].provider,
            tuple(turn.tokens_per_s for turn in runner.turns),
            tuple(turn.alone_ms for turn in runner.turns),
            Accuracy(1.0, 1.0) if is_reference else agreement(runner.probe.embeddings, reference.embeddings),
            runner.probe.memory_bytes,
        )
