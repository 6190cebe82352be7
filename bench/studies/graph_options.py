"""Compares ONNX Runtime options on the CPU: optimizers, threads, memory and I/O binding.

    python -m bench.studies.graph_options BUNDLE

Each row is relative to the first row of its table. Times are medians of interleaved repetitions.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime

SHAPES = [(1, 8), (1, 32), (1, 128), (1, 256), (8, 32), (4, 64), (4, 128)]
REPETITIONS = 15
Shape = tuple[int, int]


@dataclass
class Variant:
    """Options for running a graph. The defaults match the server."""

    graph: str = "model.onnx"
    threads: int = 1
    disabled_optimizers: tuple[str, ...] = ("SkipLayerNormFusion",)
    is_spinning: bool = False
    has_arena: bool = True
    has_memory_pattern: bool = True
    is_io_binding: bool = False
    max_outputs: int | None = None
    entries: dict[str, str] = field(default_factory=dict)

    def open(self, bundle: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.enable_cpu_mem_arena = self.has_arena
        options.enable_mem_pattern = self.has_memory_pattern
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self.is_spinning)))
        for key, text in self.entries.items():
            options.add_session_config_entry(key, text)
        return onnxruntime.InferenceSession(
            bundle / "onnx" / self.graph,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(self.disabled_optimizers),
        )

    def seconds(self, session: onnxruntime.InferenceSession, shape: Shape) -> float:
        ids = np.random.default_rng(0).integers(1000, 30_000, shape)
        known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        inputs = {node.name: known[node.name] for node in session.get_inputs()}
        outputs = [node.name for node in session.get_outputs()][: self.max_outputs]
        started = time.perf_counter()
        if self.is_io_binding:
            binding = session.io_binding()
            for name, array in inputs.items():
                binding.bind_cpu_input(name, array)
            for name in outputs:
                binding.bind_output(name)
            session.run_with_iobinding(binding)
            binding.copy_outputs_to_cpu()
        else:
            session.run(outputs, inputs)
        return time.perf_counter() - started


ALL_CORES = 0
TABLES: dict[str, dict[str, Variant]] = {
    "all threads": {
        "embeddings": Variant(threads=ALL_CORES),
        "embeddings, all optimizers": Variant(threads=ALL_CORES, disabled_optimizers=()),
        "embeddings, spinning": Variant(threads=ALL_CORES, is_spinning=True),
        "attentions, one layer fetched": Variant("model_attentions.onnx", ALL_CORES, max_outputs=2),
        "attentions, all layers fetched": Variant("model_attentions.onnx", ALL_CORES),
    },
    "one thread": {
        "embeddings": Variant(),
        "IO binding": Variant(is_io_binding=True),
        "no memory arena": Variant(has_arena=False),
        "no memory pattern": Variant(has_memory_pattern=False),
        "attentions, all layers fetched": Variant("model_attentions.onnx"),
    },
    "one thread, int8": {
        "embeddings": Variant("model_int8.onnx"),
        "x64quantprecision": Variant("model_int8.onnx", entries={"session.x64quantprecision": "1"}),
        "IO binding": Variant("model_int8.onnx", is_io_binding=True),
        "no memory arena": Variant("model_int8.onnx", has_arena=False),
        "embeddings in fp32": Variant(),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ONNX Runtime's options on a bundle's graphs.")
    parser.add_argument("bundle", type=Path, help="Bundle to measure.")
    bundle = parser.parse_args().bundle
    print(f"{'batch x length':34}" + "".join(f"{f'{batch}x{length}':>8}" for batch, length in SHAPES))
    for title, variants in TABLES.items():
        if all((bundle / "onnx" / variant.graph).exists() for variant in variants.values()):
            print_table(title, measure(bundle, variants))


def measure(bundle: Path, variants: dict[str, Variant]) -> dict[str, list[float]]:
    """Return the median time of each variant for each shape, in seconds."""
    sessions = {name: variant.open(bundle) for name, variant in variants.items()}
    seconds: dict[tuple[str, Shape], list[float]] = {}
    for repetition in range(REPETITIONS + 1):  # the first is a warm-up
        for shape in SHAPES:
            for name, variant in variants.items():
                elapsed = variant.seconds(sessions[name], shape)
                time.sleep(0.3 if variant.is_spinning else 0.01)  # let spinning threads stop
                if repetition:
                    seconds.setdefault((name, shape), []).append(elapsed)
    return {name: [statistics.median(seconds[name, shape]) for shape in SHAPES] for name in variants}


def print_table(title: str, medians: dict[str, list[float]]) -> None:
    """Print the first row in milliseconds and all rows relative to it."""
    first = next(iter(medians.values()))
    print(f"{title + ', ms':34}" + "".join(f"{seconds * 1000:8.2f}" for seconds in first))
    for name, row in medians.items():
        ratios = (mine / theirs for mine, theirs in zip(row, first, strict=True))
        print(f"  {name:32}" + "".join(f"{ratio:8.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
