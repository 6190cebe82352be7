"""From a bundle to the settings that suit it on this machine: the graph alone, the engine, latency."""

import math
from dataclasses import dataclass, replace

from attnlens_server.bundle import Bundle, Kind
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine, HeadSelection, Wanted
from attnlens_server.engine.engine import choose_runtime
from attnlens_server.engine.runtimes.runtime import Division, Runtime, Session
from attnlens_server.tuning.compare import Comparison, EngineRig, Progress, compare_engines
from attnlens_server.tuning.grid import Cell, grid_shapes, time_grid
from attnlens_server.tuning.running import running
from attnlens_server.tuning.settings import WORTH_REPEATING, Setting, Speed, candidates, choose, near_best
from attnlens_server.tuning.traffic import Flow, Load, saturate, send_at_rate
from attnlens_server.tuning.variants import Variant, variants_to_compare
from attnlens_server.tuning.workload import Workload

ROUNDS = 3
GRID_SHARE = 0.2  # of the time of a setting, for a cell of the grid
LOAD_FACTOR = 6  # times the time of a setting, for a load: a tail takes long to be seen
LOAD_SHARES = (0.1, 0.5, 0.8)  # of the throughput, where no rates are given


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        attention: the graph that returns attention weights, of all layers, instead of embeddings.
        seconds: for a setting, in each round.
        thread_counts: numbers of threads to try.
        rates: texts a second; empty: LOAD_SHARES of the throughput.
        sample: texts to compare the embeddings of all engines and precisions with; None: no comparison.
    """

    attention: bool
    seconds: float
    thread_counts: tuple[int, ...]
    rates: tuple[float, ...] = ()
    sample: Workload | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured: the engines, then the settings of one of them."""

    comparison: Comparison | None
    variant: Variant
    device: str
    num_in_flight: int
    grid: tuple[Cell, ...]
    speeds: tuple[Speed, ...]
    best: Speed
    loads: tuple[Load, ...]


def run_bench(
    bundle: Bundle, config: ServerConfig, workload: Workload, options: BenchOptions, progress: Progress
) -> Report:
    """Measure.

    Args:
        bundle: the model.
        config: of a server; its engine and precision are varied first, then the threads, lanes and tokens
            of a batch of the ones that it names.
        workload: texts.
        options: what to measure.
        progress: is told.

    Raises:
        StartupError: a session can't be opened as asked.
    """
    runtime = _find_runtime(bundle, config)
    bench = _Bench(bundle, _without_fallback(config, runtime), runtime, workload, options, progress)
    variant = Variant(config.engine, config.precision)
    comparison = bench.compare(config, variant)
    grid = bench.time_graph()
    speeds = bench.sweep()
    best = choose(speeds)
    loads = bench.latencies(best)
    return Report(comparison, variant, runtime.device, bench.num_in_flight, grid, speeds, best, loads)


def _find_runtime(bundle: Bundle, config: ServerConfig) -> Runtime:
    """Return what a server would run on; `auto` falls back to the CPU once, not at every setting."""
    runtime = choose_runtime(config, bundle.precision)
    if runtime.fallback() is None:
        return runtime
    with running(bundle, config) as engine:
        return engine.runtime


def _without_fallback(config: ServerConfig, runtime: Runtime) -> ServerConfig:
    """Return the configuration that names what `auto` has found."""
    if config.provider != "auto" or config.engine != "onnxruntime":
        return config
    return replace(config, provider="cpu" if runtime.is_on_cpu else "cuda")


class _Bench:
    """What the three parts have in common."""

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        runtime: Runtime,
        workload: Workload,
        options: BenchOptions,
        progress: Progress,
    ) -> None:
        self._bundle = bundle
        self._config = config
        self._runtime = runtime
        self._workload = workload
        self._options = options
        self._progress = progress
        self._settings = candidates(options.thread_counts, is_on_cpu=runtime.is_on_cpu)
        self.num_in_flight = self._enough_in_flight()
        self._kind: Kind = "attention" if options.attention else "embeddings"
        self._wanted = _everything(bundle, self._kind)

    def _enough_in_flight(self) -> int:
        """Return how many texts fill the largest batches of all lanes twice; at least 256, as when busy."""
        most_tokens = max(setting.lanes * setting.max_batch_tokens for setting in self._settings)
        enough = math.ceil(2 * most_tokens / self._workload.mean_tokens)
        return min(max(256, enough), self._config.max_concurrent_inputs)

    def compare(self, config: ServerConfig, asked: Variant) -> Comparison | None:
        """Measure every engine in every precision, and `asked`, with the settings of `config`."""
        if self._options.sample is None:
            return None
        rig = EngineRig(
            self._bundle,
            config,
            self._workload,
            self._options.sample,
            num_in_flight=self.num_in_flight,
            seconds=self._options.seconds,
        )
        variants = variants_to_compare(asked, with_fp16=not self._runtime.is_on_cpu)
        return compare_engines(variants, rig, self._progress)

    def time_graph(self) -> tuple[Cell, ...]:
        """Time the graph alone, on one thread and on all."""
        max_bytes = self._config.max_attention_bytes if self._options.attention else None
        shapes = grid_shapes(self._bundle.model, max_bytes, is_on_cpu=self._runtime.is_on_cpu)
        thread_counts = sorted({1, *self._options.thread_counts}) if self._runtime.is_on_cpu else [1]
        cells = []
        seconds = GRID_SHARE * self._options.seconds
        self._progress("the graph alone", 0, len(shapes) * len(thread_counts))
        for cell in time_grid(
            self._open_session, thread_counts, shapes, [wanted.name for wanted in self._wanted], seconds
        ):
            cells.append(cell)
            self._progress("the graph alone", len(cells), len(shapes) * len(thread_counts))
        return tuple(cells)

    def sweep(self) -> tuple[Speed, ...]:
        """Run the engine with every setting in turn; in later rounds with those near the best only."""
        flows: dict[Setting, list[Flow]] = {setting: [] for setting in self._settings}
        turn = self._settings
        for number in range(ROUNDS):
            stage = f"settings, round {number + 1} of {ROUNDS}"
            for done, setting in enumerate(turn):
                self._progress(stage, done, len(turn))
                flows[setting].append(self._run(setting))
            speeds = tuple(_summary(setting, of_setting) for setting, of_setting in flows.items())
            turn = [speed.setting for speed in near_best(speeds, WORTH_REPEATING)]
        return speeds

    def latencies(self, best: Speed) -> tuple[Load, ...]:
        """Send texts at given rates to an engine with the best setting."""
        texts_per_s = best.median_tokens_per_s / self._workload.mean_tokens
        rates = self._options.rates or tuple(share * texts_per_s for share in LOAD_SHARES)
        loads = []
        with running(self._bundle, self._config_with(best.setting)) as engine:
            self._saturate(engine, best.setting, self._options.seconds / 2)  # to warm up
            for done, rate in enumerate(rates):
                self._progress("latency", done, len(rates))
                load = send_at_rate(
                    engine.lanes[self._kind],
                    self._workload,
                    self._wanted,
                    rate=rate,
                    seconds=LOAD_FACTOR * self._options.seconds,
                    max_concurrent_inputs=self._config.max_concurrent_inputs,
                )
                loads.append(load)
        return tuple(loads)

    def _run(self, setting: Setting) -> Flow:
        # A new engine each time: all of them at once would hold the weights dozens of times.
        with running(self._bundle, self._config_with(setting)) as engine:
            return self._saturate(engine, setting, self._options.seconds)

    def _saturate(self, engine: Engine, setting: Setting, seconds: float) -> Flow:
        return saturate(
            engine.lanes[self._kind],
            self._workload,
            self._wanted,
            num_lanes=setting.lanes,
            num_in_flight=self.num_in_flight,
            seconds=seconds,
        )

    def _config_with(self, setting: Setting) -> ServerConfig:
        return replace(
            self._config,
            threads=setting.threads,
            lanes=setting.lanes,
            max_batch_tokens=setting.max_batch_tokens,
        )

    def _open_session(self, threads: int) -> Session:
        return self._runtime.open(self._kind, self._bundle.graph_path(self._kind), Division(threads, 1))


def _everything(bundle: Bundle, kind: Kind) -> tuple[Wanted, ...]:
    """Return all that a graph is there for: the attention of all layers and heads, or the token vectors."""
    if kind == "embeddings":
        return (Wanted(bundle.model.outputs.hidden_state(kind).name),)
    outputs = bundle.model.graphs[kind].outputs
    return tuple(
        Wanted(output.name, output.layout, HeadSelection(), output.pattern)
        for output in outputs
        if output.num_heads
    )


def _summary(setting: Setting, flows: list[Flow]) -> Speed:
    padding_share = sum(flow.padding_share for flow in flows) / len(flows)
    return Speed(setting, tuple(flow.tokens_per_s for flow in flows), padding_share)
