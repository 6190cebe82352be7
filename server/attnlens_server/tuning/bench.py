"""The benchmark: compares engines and precisions, then searches settings for one of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from attnlens.v1.manifest_pb2 import EngineCheck
from attnlens_server.bundle import Bundle, Kind, open_bundle
from attnlens_server.bundle.engine_checks import find_engine_check
from attnlens_server.config import DEFAULT_DEVICE, ConfigError, ServerConfig
from attnlens_server.engine import Engine, HeadSelection, Item, RequestedOutput
from attnlens_server.errors import StartupError
from attnlens_server.tuning.probe import Probe, main_output, probe_in_subprocess
from attnlens_server.tuning.settings import (
    REPEAT_MARGIN,
    Setting,
    SettingResult,
    candidates,
    choose,
    near_best,
)
from attnlens_server.tuning.throughput import measure_latency_ms, measure_throughput, running
from attnlens_server.tuning.variants import (
    REFERENCE,
    Turn,
    Variant,
    VariantResult,
    measure_accuracy,
    variants_to_compare,
)
from attnlens_server.tuning.workload import Workload

ROUNDS = 3
SHORT_TOKENS = 16  # length of the text for `Turn.alone_ms`
LATENCY_FRACTION = 0.2  # duration relative to a throughput measurement
MIN_IN_FLIGHT = 256

Progress = Callable[[str, int, int], None]
"""Called with the current stage, the number of finished steps, and the number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark.

    Attributes:
        attention: Measure the graph that returns the attention weights of all layers, not embeddings.
        seconds: Time of each measurement.
        thread_counts: Numbers of threads to try.
        sample: Texts for the accuracy of engines and precisions. If None, they are not compared.
    """

    attention: bool
    seconds: float
    thread_counts: tuple[int, ...]
    sample: Workload | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Measurements of all variants.

    Attributes:
        sample: Texts for `VariantResult.accuracy`.
        alone_tokens: Length of the text for `Turn.alone_ms`.
        results: Variants that ran, with `REFERENCE` first.
        skipped: Variants that cannot run on this machine, with the reason.
    """

    sample: Workload
    alone_tokens: int
    results: tuple[VariantResult, ...]
    skipped: dict[Variant, str]


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a benchmark: the comparison, then the settings of one variant."""

    comparison: Comparison | None
    variant: Variant
    device: str
    num_in_flight: int
    results: tuple[SettingResult, ...]
    best: SettingResult


def run_bench(
    bundle: Bundle, config: ServerConfig, workload: Workload, options: BenchOptions, progress: Progress
) -> Report:
    """Compare engines and precisions, then search threads, lanes and batch tokens for one of them.

    Args:
        bundle: Bundle to serve.
        config: Server configuration. Its engine and precision are the ones whose settings are searched.
        workload: Texts for the throughput.
        options: Options.
        progress: Called before each measurement.

    Raises:
        StartupError: The engine cannot run with this configuration.
    """
    with running(bundle, config) as engine:
        runtime = engine.runtime
    benchmark = _Benchmark(bundle, config, workload, options, progress, is_on_cpu=runtime.is_on_cpu)
    comparison = None
    variant = Variant(config.engine, config.precision)
    if options.sample is not None:
        variants = variants_to_compare(variant, with_fp16=not runtime.is_on_cpu)
        comparison = benchmark.compare(variants, options.sample)
    if config.provider == "auto" and config.engine == "onnxruntime":
        # Otherwise each engine of the search would try CUDA again.
        config = replace(config, provider="cpu" if runtime.is_on_cpu else "cuda")
    results = benchmark.search(config)
    return Report(comparison, variant, runtime.device, benchmark.num_in_flight, results, best=choose(results))


def config_for(config: ServerConfig, variant: Variant) -> ServerConfig:
    """Return the configuration of a server with this engine and precision.

    The device options of `config` are kept only for the engine that they belong to.

    Raises:
        ConfigError: The engine does not support the precision.
    """
    changes: dict[str, Any] = {"engine": variant.engine, "precision": variant.precision}
    if variant.engine != config.engine:
        changes |= {"provider": "auto", "device_id": 0, "device": DEFAULT_DEVICE}
    return replace(config, **changes)


def run_in_turns(
    variants: Sequence[Variant],
    probe: Callable[[Variant], Probe],
    measure: Callable[[Variant], Turn],
    progress: Progress,
) -> tuple[dict[Variant, tuple[Probe, list[Turn]]], dict[Variant, str]]:
    """Probe all variants, then measure them in turn, ROUNDS times.

    A machine that is busy for a while then slows down all variants, not only one.

    Args:
        variants: Variants to run, with `REFERENCE` first.
        probe: Raises StartupError or ConfigError if a variant cannot run on this machine.
        measure: Measures the speed in one round.
        progress: Called before each step.

    Returns:
        The measurements of each variant that ran, and the reason for each that was skipped.

    Raises:
        StartupError: `REFERENCE` cannot run.
    """
    measured: dict[Variant, tuple[Probe, list[Turn]]] = {}
    skipped: dict[Variant, str] = {}
    for done, variant in enumerate(variants):
        progress("engines: accuracy and memory", done, len(variants))
        try:
            measured[variant] = probe(variant), []
        except (StartupError, ConfigError) as error:
            if variant == REFERENCE:
                raise
            skipped[variant] = str(error)
    for number in range(1, ROUNDS + 1):
        for done, (variant, (_, turns)) in enumerate(measured.items()):
            progress(f"engines: speed, round {number} of {ROUNDS}", done, len(measured))
            turns.append(measure(variant))
    return measured, skipped


class _Benchmark:
    """Measurements with the same bundle, texts and options."""

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        workload: Workload,
        options: BenchOptions,
        progress: Progress,
        *,
        is_on_cpu: bool,
    ) -> None:
        self._bundle = bundle
        self._config = config
        self._workload = workload
        self._options = options
        self._progress = progress
        self._settings = candidates(options.thread_counts, is_on_cpu=is_on_cpu)
        self._short_text = workload.nearest(SHORT_TOKENS)
        # Enough texts to fill the largest batches of all lanes twice.
        max_tokens = max(setting.lanes * setting.max_batch_tokens for setting in self._settings)
        num_texts = max(MIN_IN_FLIGHT, math.ceil(2 * max_tokens / workload.mean_tokens))
        self.num_in_flight = min(num_texts, config.max_concurrent_inputs)

    def compare(self, variants: Sequence[Variant], sample: Workload) -> Comparison:
        """Measure all variants with default settings."""

        def probe(variant: Variant) -> Probe:
            check = self._find_check(variant)
            if check is not None and not check.passed:  # A server refuses to start.
                command = f"attnlens check {self._bundle.directory} --engine {variant.engine}"
                raise StartupError(f"it did not pass `{command}`")
            return probe_in_subprocess(*self._configure(variant), sample.input_ids)

        measured, skipped = run_in_turns(variants, probe, self._measure_turn, self._progress)
        reference = measured[REFERENCE][0].embeddings
        results = tuple(
            VariantResult(
                variant,
                tuple(turns),
                measure_accuracy(probe.embeddings, reference),
                probe.memory_bytes,
                # Every bundle records the parity of ONNX Runtime.
                is_checked=variant.engine == REFERENCE.engine or self._find_check(variant) is not None,
            )
            for variant, (probe, turns) in measured.items()
        )
        return Comparison(sample, len(self._short_text), results, skipped)

    def search(self, config: ServerConfig) -> tuple[SettingResult, ...]:
        """Measure all settings in turn. Later rounds repeat only those near the best one."""
        kind: Kind = "attention" if self._options.attention else self._bundle.model.main_kind
        outputs = _all_outputs(self._bundle, kind)
        rates: dict[Setting, list[float]] = {setting: [] for setting in self._settings}
        selected = self._settings
        for number in range(1, ROUNDS + 1):
            for done, setting in enumerate(selected):
                self._progress(f"settings, round {number} of {ROUNDS}", done, len(selected))
                # Opened for each measurement, so that only one copy of the weights is in memory.
                with running(self._bundle, replace(config, **asdict(setting))) as engine:
                    rates[setting].append(self._measure_throughput(engine, kind, outputs))
            results = tuple(
                SettingResult(setting, tuple(of_setting)) for setting, of_setting in rates.items()
            )
            selected = [result.setting for result in near_best(results, REPEAT_MARGIN)]
        return results

    def _measure_turn(self, variant: Variant) -> Turn:
        with running(*self._configure(variant)) as engine:
            outputs = main_output(self._bundle)
            kind = self._bundle.model.main_kind
            self._measure_throughput(engine, kind, outputs)  # Batches of a new shape are slower.
            tokens_per_s = self._measure_throughput(engine, kind, outputs)
            alone_ms = measure_latency_ms(
                engine,
                lambda: Item(self._short_text, outputs),
                LATENCY_FRACTION * self._options.seconds,
            )
            return Turn(engine.runtime.device, tokens_per_s, alone_ms)

    def _measure_throughput(self, engine: Engine, kind: Kind, outputs: tuple[RequestedOutput, ...]) -> float:
        return measure_throughput(
            engine.lanes[kind],
            self._workload,
            outputs,
            num_lanes=engine.num_lanes,
            num_in_flight=self.num_in_flight,
            seconds=self._options.seconds,
        )

    def _configure(self, variant: Variant) -> tuple[Bundle, ServerConfig]:
        config = config_for(self._config, variant)
        return open_bundle(self._bundle.directory, variant.precision), config

    def _find_check(self, variant: Variant) -> EngineCheck | None:
        device = config_for(self._config, variant).device
        return find_engine_check(self._bundle.manifest, variant.engine, variant.precision, device)


def _all_outputs(bundle: Bundle, kind: Kind) -> tuple[RequestedOutput, ...]:
    """Return the token vectors, the logits, or the attention of all layers and heads."""
    if kind == "logits":
        return main_output(bundle)
    if kind == "embeddings":
        return (RequestedOutput(bundle.model.outputs.hidden_state(kind).name),)
    return tuple(
        RequestedOutput(output.name, output.layout, HeadSelection(), output.pattern)
        for output in bundle.model.graphs[kind].outputs
        if output.num_heads
    )
