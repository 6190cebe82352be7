"""Generates the cost tables of attention mechanisms in docs/mechanisms.md and docs/performance.md.

    python -m bench.studies.mechanisms [MECHANISM ...] [--threads 2]
    python -m bench.studies.mechanisms --long-texts docs/pictures/long_texts.png --threads 1

Runs randomly initialized encoders (6 layers, hidden size 384, 12 heads) in ONNX Runtime with one text per
batch, alternating with softmax attention of the same size. Times are medians. Memory is the peak increase
over the memory after loading the graph, measured in a separate process.

Times of long texts are CPU times, which other programs affect less than elapsed time; with one thread on an
idle machine, both are equal. Ratios are medians over repetitions, each of which runs every encoder once. The
text of 8,192 tokens needs 7 GB of memory.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnlens_analysis.profile import Profile, describe_crossover, reliability
from attnlens_analysis.profile.measure import summary
from attnlens_analysis.profile.trace import trace_runs
from attnlens_export.graph.names import ATTENTIONS_PATH, EMBEDDINGS_PATH
from attnlens_export.graph.trace import embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_model import EncoderConfig, new_encoder

NUM_LAYERS, WIDTH, NUM_HEADS, MAX_TOKENS = 6, 384, 12, 4096
PLAIN = "softmax"
# Configuration overrides and text lengths, by mechanism.
MECHANISMS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    PLAIN: ({}, ()),
    "longformer": ({"kind": "longformer", "window": 64}, (64, 128, 1024, 4096)),
    "big_bird": ({"kind": "big_bird", "block_size": 64, "num_random_blocks": 3}, (128, 704, 1024, 4096)),
    "overlapping": ({"kind": "overlapping", "overlap": 8}, (128, 256, 512)),
    "mixture": ({"kind": "mixture", "shared_heads": 3, "active_heads": 6}, (128, 256, 512)),
    "composed": ({"kind": "composed"}, (128, 256, 512)),
}
GRAPHS = {"embeddings": EMBEDDINGS_PATH, "attention": ATTENTIONS_PATH}
MIN_RUNS, MIN_SECONDS = 3, 1.0

LONG_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
# Longformer-base has a window of 256 tokens on each side, BigBird-base blocks of 64 tokens.
LONG_TEXTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "longformer, w = 64": {"kind": "longformer", "window": 64},
    "longformer, w = 256": {"kind": "longformer", "window": 256},
    "big_bird": {
        "kind": "big_bird",
        "block_size": 64,
        "num_random_blocks": 3,
        "table_tokens": LONG_LENGTHS[-1],
    },
}
LONG_MIN_RUNS, LONG_MIN_SECONDS, PROFILE_RUNS = 5, 12.0, 4
MIN_MEMORY_TOKENS = 1024  # shorter texts fit into memory that loading the graph has freed
STYLES = (("#000000", "o"), ("#0072B2", "s"), ("#56B4E9", "D"), ("#D55E00", "^"))  # of Okabe and Ito


class LongTexts(NamedTuple):
    """Measurements of the encoders in `LONG_TEXTS`, by name and then by length."""

    lengths: Sequence[int]
    times_s: Mapping[str, Sequence[float]]
    """Median times."""
    ratios: Mapping[str, Sequence[float]]
    """Median of the time relative to softmax attention in the same repetition."""
    peak_bytes: Mapping[str, Sequence[int]]


def configuration(attention: dict[str, Any], max_tokens: int = MAX_TOKENS) -> EncoderConfig:
    """Return the encoder configuration of a row."""
    return EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": WIDTH,
            "num_layers": NUM_LAYERS,
            "embeddings": {"vocab_size": 1000},
            "positions": {"max_position_embeddings": max_tokens},
            "attention": {"kind": PLAIN, "num_heads": NUM_HEADS, **attention},
            "feed_forward": {"intermediate_size": 4 * WIDTH},
        }
    )


def write_graphs(name: str, config: EncoderConfig, directory: Path) -> None:
    """Trace an encoder and write both graphs."""
    attentions = trace(new_encoder(config, seed=0), config)
    for graph, traced in (("attention", attentions), ("embeddings", embeddings_graph(attentions))):
        path = directory / f"{name}.{graph}.onnx"
        write_embedded(path, traced.proto, traced.weights)


def open_graph(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """Open a graph with the provider of the server."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # With a pattern, the second run of 8,192 tokens allocates 7 GB in addition to those of the first.
    options.enable_mem_pattern = False
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feed(length: int) -> dict[str, np.ndarray]:
    """Return the inputs for one text of `length` tokens."""
    ids = np.random.default_rng(length).integers(0, 1000, (1, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def run_s(
    session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray], clock: Callable[[], float]
) -> float:
    """Return the duration of one run, in seconds."""
    begin = clock()
    session.run(None, inputs)
    return clock() - begin


def durations_s(
    sessions: Mapping[str, onnxruntime.InferenceSession],
    length: int,
    min_runs: int = MIN_RUNS,
    min_seconds: float = MIN_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the times of each session in alternating runs, in seconds."""
    inputs = feed(length)
    durations: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(None, inputs)
    begin = time.perf_counter()
    while len(durations[PLAIN]) < min_runs or time.perf_counter() - begin < min_seconds:
        for name, session in sessions.items():
            durations[name].append(run_s(session, inputs, clock))
    return durations


def peak_bytes(path: Path, length: int, threads: int) -> int:
    """Return the peak memory increase of one run, measured in a separate process."""
    command = [sys.executable, "-m", "bench.studies.mechanisms", "--peak-of", str(path)]
    command += ["--length", str(length), "--threads", str(threads)]
    response = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(response))


def print_peak(path: Path, length: int, threads: int) -> None:
    """Run a graph once in this process and print the peak memory increase in bytes."""
    session = open_graph(path, threads)
    session.run(None, feed(8))
    before = peak_memory_bytes()
    session.run(None, feed(length))
    print(json.dumps(peak_memory_bytes() - before))


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def rows(name: str, directory: Path, threads: int) -> Iterator[str]:
    """Yield the table rows of a mechanism."""
    for graph in GRAPHS:
        paths = {kind: directory / f"{kind}.{graph}.onnx" for kind in (PLAIN, name)}
        sessions = {kind: open_graph(path, threads) for kind, path in paths.items()}
        for length in MECHANISMS[name][1]:
            durations = durations_s(sessions, length)
            medians = {kind: statistics.median(times) for kind, times in durations.items()}
            peak = peak_bytes(paths[name], length, threads) / 1e6
            ratio = medians[name] / medians[PLAIN]
            cells = [name, graph, str(length), f"{1000 * medians[name]:.1f}", f"{1000 * medians[PLAIN]:.1f}"]
            yield "| " + " | ".join([*cells, f"{ratio:.2f}", f"{peak:.0f}"]) + " |"


def measure_long_texts(lengths: Sequence[int], directory: Path, threads: int) -> LongTexts:
    """Measure the encoders in `LONG_TEXTS`, and print the table."""
    paths = {name: directory / f"{name}.embeddings.onnx" for name in LONG_TEXTS}
    for name, attention in LONG_TEXTS.items():
        write_graphs(name, configuration(attention, LONG_LENGTHS[-1]), directory)
    times: dict[str, list[float]] = {name: [] for name in paths}
    ratios: dict[str, list[float]] = {name: [] for name in paths}
    # Before this process holds the memory of a long text.
    peaks = {name: [peak_bytes(path, length, threads) for length in lengths] for name, path in paths.items()}
    print("| tokens | encoder | ms | quartiles, ms | runs | ratio | quartiles of ratio | memory, MB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for index, length in enumerate(lengths):
        sessions = {name: open_graph(path, threads) for name, path in paths.items()}  # without used memory
        durations = durations_s(sessions, length, LONG_MIN_RUNS, LONG_MIN_SECONDS, time.process_time)
        for name in paths:
            own = np.array(durations[name])
            low, median, high = np.quantile(1000 * own, (0.25, 0.5, 0.75))
            ratio = np.quantile(own / durations[PLAIN], (0.25, 0.5, 0.75))
            times[name].append(median / 1000)
            ratios[name].append(ratio[1])
            cells = [f"{length:,}", name, f"{median:,.1f}", f"{low:,.1f} to {high:,.1f}", str(len(own))]
            cells += [
                f"{ratio[1]:.2f}",
                f"{ratio[0]:.2f} to {ratio[2]:.2f}",
                f"{peaks[name][index] / 1e6:,.0f}",
            ]
            print("| " + " | ".join(cells) + " |", flush=True)
    return LongTexts(lengths, times, ratios, peaks)


def profile_softmax(lengths: Sequence[int], directory: Path, threads: int) -> Profile:
    """Profile the graph with softmax attention."""
    path = directory / f"{PLAIN}.embeddings.onnx"
    runs = trace_runs(path, [feed(length) for length in lengths], PROFILE_RUNS, threads, lambda _: None)
    profiles = tuple(summary(length, traced) for length, traced in zip(lengths, runs, strict=True))
    return Profile(PLAIN, "fp32", (PLAIN,), threads, profiles)


def crossing(lengths: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Return the length from which all ratios are below 1, interpolated on logarithmic scales.

    Returns None if the last ratio is not below 1.
    """
    if ratios[-1] >= 1:
        return None
    first = max((index + 1 for index, ratio in enumerate(ratios) if ratio >= 1), default=0)
    if first == 0:
        return lengths[0]
    around = slice(first - 1, first + 1)
    falling = [-math.log(ratio) for ratio in ratios[around]]
    return math.exp(float(np.interp(0, falling, np.log(lengths[around]))))


def study_long_texts(picture: Path, lengths: Sequence[int], threads: int) -> None:
    """Print the table and the crossings of long texts, and draw the picture."""
    with tempfile.TemporaryDirectory() as directory:
        measured = measure_long_texts(lengths, Path(directory), threads)
        profile = profile_softmax(lengths, Path(directory), threads)
    print("\n| tokens | softmax, ms | time in attention |\n|---|---|---|")
    for each in profile.lengths:
        print(f"| {each.length:,} | {each.total_ms:,.1f} | {100 * each.attention_share:.0f} % |")
    print(describe_crossover(profile), reliability(profile))
    for name, ratios in measured.ratios.items():
        if name != PLAIN:
            at = crossing(lengths, ratios)
            print(f"{name} is faster than {PLAIN} from {'none' if at is None else f'{at:,.0f}'} tokens")
    draw_long_texts(picture, measured)


def draw_long_texts(path: Path, measured: LongTexts) -> None:
    """Draw times with crossings, and memory, by length."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, times), (color, marker) in zip(measured.times_s.items(), STYLES, strict=True):
        milliseconds = [1000 * each for each in times]
        left.loglog(measured.lengths, milliseconds, color=color, marker=marker, markersize=4, label=name)
        peaks = zip(measured.lengths, measured.peak_bytes[name], strict=True)
        megabytes = {length: peak / 1e6 for length, peak in peaks if length >= MIN_MEMORY_TOKENS}
        right.loglog(list(megabytes), list(megabytes.values()), color=color, marker=marker, markersize=4)
        at = crossing(measured.lengths, measured.ratios[name])
        if at is not None:
            plain = np.log(measured.times_s[PLAIN])
            height = 1000 * math.exp(float(np.interp(math.log(at), np.log(measured.lengths), plain)))
            left.plot(at, height, "o", markersize=11, fillstyle="none", color=color, markeredgewidth=1.6)
            left.annotate(f"{at:,.0f}", (at, height), (-8, 8), textcoords="offset points", ha="right")
    left.set(title="CPU time of one text", ylabel="ms")
    right.set(title="peak memory of one text", ylabel="MB")
    left.legend(frameon=False, loc="upper left")
    show_lengths(left, measured.lengths)
    show_lengths(right, [length for length in measured.lengths if length >= MIN_MEMORY_TOKENS])
    figure.savefig(path, dpi=130)


def show_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Label the measured lengths, and write plain numbers."""
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("tokens")
    axes.grid(color="#dddddd", linewidth=0.6)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mechanisms", nargs="*", help="Mechanisms to run. Defaults to all.")
    parser.add_argument("--threads", type=int, default=2, help="Threads of ONNX Runtime.")
    parser.add_argument(
        "--long-texts", type=Path, metavar="PNG", help="Measure long texts instead, and write this picture."
    )
    parser.add_argument(
        "--max-tokens", type=int, default=LONG_LENGTHS[-1], help="Maximum length of long texts."
    )
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print_peak(arguments.peak_of, arguments.length, arguments.threads)
        return
    if arguments.long_texts:
        lengths = [length for length in LONG_LENGTHS if length <= arguments.max_tokens]
        study_long_texts(arguments.long_texts, lengths, arguments.threads)
        return
    print("| mechanism | graph | tokens | ms | plain, ms | ratio | memory, MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        names = dict.fromkeys((PLAIN, *(arguments.mechanisms or MECHANISMS)))
        for name in names:
            write_graphs(name, configuration(MECHANISMS[name][0]), Path(directory))
        for name in names:
            for row in rows(name, Path(directory), arguments.threads):
                print(row, flush=True)


if __name__ == "__main__":
    main()
