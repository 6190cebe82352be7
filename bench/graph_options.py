"""ONNX Runtime's choices on the CPU, measured in one run: which optimizers, how many threads.

    python bench/graph_options.py BUNDLE

Each row is the time of a graph relative to the first row, median of interleaved repetitions.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime

SHAPES = [(1, 8), (1, 32), (1, 128), (1, 256), (16, 32), (4, 128)]
NO_FUSION, STILL = ["SkipLayerNormFusion"], {"session.intra_op.allow_spinning": "0"}
ALL_CORES = 0
VARIANTS: dict[str, tuple[str, list[str], dict[str, str], int]] = {
    "embeddings, as served alone": ("model.onnx", NO_FUSION, STILL, ALL_CORES),
    "embeddings, on one thread": ("model.onnx", NO_FUSION, STILL, 1),
    "embeddings, all optimizers": ("model.onnx", [], STILL, ALL_CORES),
    "embeddings, spinning": ("model.onnx", NO_FUSION, {}, ALL_CORES),
    "attentions, one layer fetched": ("model_attentions.onnx", NO_FUSION, STILL, ALL_CORES),
    "attentions, all layers fetched": ("model_attentions.onnx", NO_FUSION, STILL, ALL_CORES),
}
REPETITIONS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ONNX Runtime's options on a bundle's graphs.")
    parser.add_argument("bundle", type=Path)
    bundle = parser.parse_args().bundle
    sessions = {name: open_session(bundle, *variant) for name, variant in VARIANTS.items()}
    seconds: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for repetition in range(REPETITIONS + 1):  # the first warms up
        for shape in SHAPES:
            for name, session in sessions.items():
                time.sleep(0.02)  # until the threads of the session before have stopped spinning
                elapsed = run(session, shape, outputs_of(session, name))
                if repetition:
                    seconds.setdefault((name, shape), []).append(elapsed)
    medians = {key: statistics.median(each) for key, each in seconds.items()}
    first = next(iter(VARIANTS))
    print(f"{'batch x length':32}" + "".join(f"{f'{batch}x{length}':>10}" for batch, length in SHAPES))
    print(f"{first + ', ms':32}" + "".join(f"{medians[first, shape] * 1000:10.2f}" for shape in SHAPES))
    for name in VARIANTS:
        ratios = (medians[name, shape] / medians[first, shape] for shape in SHAPES)
        print(f"{name:32}" + "".join(f"{ratio:10.2f}" for ratio in ratios))


def open_session(
    bundle: Path, graph: str, disabled: list[str], entries: dict[str, str], threads: int
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    for key, text in entries.items():
        options.add_session_config_entry(key, text)
    return onnxruntime.InferenceSession(
        bundle / "onnx" / graph, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )


def outputs_of(session: onnxruntime.InferenceSession, name: str) -> list[str]:
    names = [each.name for each in session.get_outputs()]
    return names[:2] if "one layer" in name else names


def run(session: onnxruntime.InferenceSession, shape: tuple[int, int], outputs: list[str]) -> float:
    ids = np.random.default_rng(0).integers(1000, 30_000, shape)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    started = time.perf_counter()
    session.run(outputs, inputs)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
