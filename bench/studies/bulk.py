"""Measures bulk embedding: rate relative to the engine alone and to sentence-transformers, and memory.

    python -m bench.studies.bulk BUNDLE --checkpoint DIR [--texts 20000] [--rounds 3]
    python -m bench.studies.bulk BUNDLE --texts 600000 --rounds 1   # ten minutes: is the memory constant?

The file contains different short sentences, one per line. The programs run in turn, each in its own process
with the same number of threads, in fp32. Only the time after loading the model is measured. Bulk embedding
and sentence-transformers read the file, tokenize, embed, and write the embeddings.
"""

# ruff: noqa: PLC0415 - a process imports only its own program
import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import numpy as np

from attnlens_bulk.run import DEFAULT_ROWS_PER_PART
from bench.workloads import DATA

THREADS = 2
BATCH_SIZES = (32, 128)  # of sentence-transformers, whose default is 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure bulk embedding.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="the same model for sentence-transformers")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows-per-part", type=int, default=DEFAULT_ROWS_PER_PART)
    parser.add_argument("--engine", choices=["onnxruntime", "openvino"], default="onnxruntime")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one measurement, in a process of its own
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(_MEASUREMENTS[arguments.run](arguments)))
        return
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "texts.txt")
        file.write_text("".join(f"{text}\n" for text in sentences(arguments.texts)), encoding="utf-8")
        names = [name for name in _MEASUREMENTS if arguments.checkpoint or not name.startswith("sentence")]
        results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name in names:
                results[name].append(_run(name, file))
    print("| program | texts/s | per CPU second | RSS after 10 %, MiB | at the end |\n|---|---|---|---|---|")
    for name, rounds in results.items():
        cells = [_cell(rounds, key) for key in ("texts_per_s", "texts_per_cpu_s", "rss_early", "rss_end")]
        print(f"| {name} | {' | '.join(cells)} |")


def _cell(rounds: list[dict[str, float]], key: str) -> str:
    """Return the median, and all rounds in parentheses."""
    values = [result[key] for result in rounds if key in result]
    return (
        f"{statistics.median(values):.0f} ({', '.join(f'{value:.0f}' for value in values)})" if values else ""
    )


def sentences(number: int) -> list[str]:
    """Return different sentences of STS-B, to which a number is added."""
    with (DATA / "stsb-en-dev.csv").open(encoding="utf-8", newline="") as file:
        texts = [text for row in csv.reader(file) for text in row[:2]]
    order = np.random.default_rng(0).permutation(number)
    return [f"{texts[index % len(texts)]} {index // len(texts)}" for index in order]


def _run(name: str, file: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.studies.bulk", *sys.argv[1:], "--run", name, "--file", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "true"}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _engine(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the rate of the engine with tokenized texts, as `attnlens bench` measures it."""
    from attnlens_server.bundle import open_bundle
    from attnlens_server.config import ServerConfig
    from attnlens_server.tuning import read_workload
    from attnlens_server.tuning.probe import main_output
    from attnlens_server.tuning.throughput import measure_throughput, running

    config = ServerConfig(bundle=arguments.bundle, threads=THREADS, engine=arguments.engine)
    bundle = open_bundle(arguments.bundle, "fp32")
    with arguments.file.open(encoding="utf-8") as file:
        workload = read_workload(bundle, (line.rstrip("\n") for line in file), str(arguments.file))
    with running(bundle, config) as engine, _Timer() as timer:
        lanes = engine.lanes[bundle.model.main_kind]
        tokens_per_s = measure_throughput(
            lanes,
            workload,
            main_output(bundle),
            num_lanes=engine.num_lanes,
            num_in_flight=1024,
            seconds=min(60.0, arguments.texts / 1000),
        )
        num_texts = lanes.num_live_tokens / workload.mean_tokens
    return timer.rates(num_texts) | {"texts_per_s": tokens_per_s / workload.mean_tokens}


def _bulk(arguments: argparse.Namespace) -> dict[str, float]:
    import attnlens_server
    from attnlens_bulk import Progress, RunOptions, embed_files

    options = RunOptions(rows_per_part=arguments.rows_per_part)
    samples: list[tuple[float, float]] = []

    def sample(state: Progress) -> None:
        samples.append((state.position, _rss_mib()))

    with (
        tempfile.TemporaryDirectory() as output,
        attnlens_server.local(arguments.bundle, threads=THREADS, engine=arguments.engine) as model,
    ):
        model.embed(["warm-up"])
        with _Timer() as timer:
            report = embed_files([str(arguments.file)], f"{output}/run/", [model], options, progress=sample)
    early = next(rss for position, rss in samples if position >= 0.1)
    return timer.rates(report.num_rows) | {"rss_early": early, "rss_end": samples[-1][1]}


def _sentence_transformers(arguments: argparse.Namespace, batch_size: int) -> dict[str, float]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(THREADS)
    model = SentenceTransformer(str(arguments.checkpoint), device="cpu")
    model.encode(["warm-up"])
    with tempfile.TemporaryDirectory() as output, _Timer() as timer:
        texts = arguments.file.read_text(encoding="utf-8").splitlines()
        vectors = model.encode(texts, batch_size=batch_size, normalize_embeddings=True)
        np.save(Path(output, "vectors.npy"), vectors)
    return timer.rates(len(texts))


class _Timer:
    """Wall time and CPU time of a block. CPU time depends less on other programs of the machine."""

    def __enter__(self) -> Self:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._start[0]
        self.cpu_s = time.process_time() - self._start[1]

    def rates(self, num_texts: float) -> dict[str, float]:
        return {"texts_per_s": num_texts / self.wall_s, "texts_per_cpu_s": num_texts / self.cpu_s}


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


_MEASUREMENTS: dict[str, Any] = {
    "engine alone": _engine,
    "attnlens_bulk, in process": _bulk,
    **{
        f"sentence-transformers, torch, batches of {size}": lambda arguments, size=size: (
            _sentence_transformers(arguments, size)
        )
        for size in BATCH_SIZES
    },
}

if __name__ == "__main__":
    main()
