"""Measures the engine and the server on CUDA, and PyTorch on the same GPU.

    python -m bench.studies.cuda BUNDLE CHECKPOINT [--provider cuda] [--parts engine,torch] [--quick]

BUNDLE has an fp16 graph, and CHECKPOINT is the checkpoint that it was exported from. Each part prints a
table. Rates are medians of `REPETITIONS` runs after a warm-up. PyTorch computes `AutoModel` of transformers
with SDPA, on batches sorted by length, and pools on the GPU. Both receive token ids, return one vector per
text in host memory, and compute fp32 without TF32.
"""

import argparse
import datetime as dt
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import onnxruntime
import tokenizers

from attnlens.pooling import Pooling
from attnlens_server.bundle import open_bundle
from attnlens_server.config import Precision, Provider, ServerConfig
from attnlens_server.engine import Engine, HeadSelection, Item, RequestedOutput, TokenPooling
from attnlens_server.engine.batch import pad
from attnlens_server.engine.runtimes.device import DeviceSession
from attnlens_server.engine.runtimes.onnx_session import OnnxSession
from attnlens_server.engine.runtimes.runtime import feed_of
from bench.lines import LineProcess
from bench.servers import attnlens_server
from bench.workloads import Corpus

LOG = Path(".bench/logs")
REPETITIONS = 3
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
BATCH_TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
MAX_TOKENS = 512
Ids = list[npt.NDArray[np.int64]]


class Setting(NamedTuple):
    """Arguments of the study, and the token ids of the texts by workload."""

    bundle: Path
    checkpoint: Path
    provider: Provider
    quick: bool
    texts: dict[str, Ids]
    strings: dict[str, list[str]]

    @property
    def batch_tokens(self) -> Sequence[int]:
        """Limits to measure."""
        return BATCH_TOKENS[:1] if self.quick else BATCH_TOKENS

    @property
    def repetitions(self) -> int:
        """Runs per row, without the warm-up."""
        return 1 if self.quick else REPETITIONS


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure CUDA.")
    parser.add_argument("bundle", type=Path, help="Bundle with an fp16 graph.")
    parser.add_argument("checkpoint", type=Path, help="Checkpoint of the bundle, for PyTorch.")
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="Comma-separated parts of the study.")
    parser.add_argument("--quick", action="store_true", help="Run few texts, to test the study itself.")
    arguments = parser.parse_args()
    setting = make_setting(arguments)
    describe_machine(setting)
    for name in arguments.parts.split(","):
        started = time.perf_counter()
        print(f"\n## {name}\n", flush=True)
        try:
            PARTS[name](setting)
        except Exception as error:  # noqa: BLE001 - the other parts are still measured
            print(f"failed: {type(error).__name__}: {error}")
        gc.collect()
        print(f"\n{name}: {time.perf_counter() - started:.1f} s", flush=True)


def make_setting(arguments: argparse.Namespace) -> Setting:
    corpus = Corpus(arguments.bundle)
    quick = arguments.quick
    workloads = {
        "sentences": corpus.sentences(64 if quick else 2800),
        "passages": corpus.passages(16 if quick else 1200),
        "long": corpus.long(4 if quick else 256),
    }
    tokenizer = tokenizers.Tokenizer.from_file(str(arguments.bundle / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = {
        name: [np.asarray(encoding.ids, np.int64) for encoding in tokenizer.encode_batch(workload.texts)]
        for name, workload in workloads.items()
    }
    strings = {name: workload.texts for name, workload in workloads.items()}
    return Setting(arguments.bundle, arguments.checkpoint, arguments.provider, quick, texts, strings)


def describe_machine(setting: Setting) -> None:
    print(f"date: {dt.datetime.now(tz=dt.UTC):%Y-%m-%d}")
    if setting.provider == "cuda":
        query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
        print(
            "GPU:", subprocess.check_output(["nvidia-smi", query, "--format=csv,noheader"], text=True).strip()
        )
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    print(
        f"CPU: {cpu.split(': ')[1]}, {len(os.sched_getaffinity(0))} CPUs; Python {platform.python_version()}"
    )
    print(f"onnxruntime {onnxruntime.__version__}")
    for package in ("torch", "transformers", "nvidia-cudnn-cu13", "nvidia-cublas", "grpcio"):
        try:
            print(package, version(package))
        except ModuleNotFoundError:
            print(package, "not installed")
    for name, ids in setting.texts.items():
        lengths = sorted(map(len, ids))
        print(
            f"{name}: {len(ids)} texts, {sum(lengths)} tokens, median {lengths[len(lengths) // 2]}, "
            f"maximum {lengths[-1]}"
        )


def median_s(run: Callable[[], object], repetitions: int) -> float:
    """Return the median duration after a warm-up, in seconds."""
    run()
    durations = []
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


# --- the engine -----------------------------------------------------------------------------------


@contextmanager
def open_engine(
    setting: Setting, precision: Precision = "fp32", *, max_batch_tokens: int, lanes: int
) -> Iterator[Engine]:
    """Return a running engine without a limit on the memory of attention weights."""
    config = ServerConfig(
        bundle=setting.bundle,
        provider=setting.provider,
        precision=precision,
        max_attention_bytes=1 << 34,
        max_batch_tokens=max_batch_tokens,
        lanes=lanes,
    )
    engine = Engine(open_bundle(setting.bundle, precision), config)
    engine.start(MAX_TOKENS)
    try:
        yield engine
    finally:
        engine.close()


def embed(engine: Engine, texts: Ids) -> list[npt.NDArray[np.float32]]:
    requested = (RequestedOutput("last_hidden_state", keep=TokenPooling(Pooling.MEAN)),)
    futures = engine.submit([Item(ids, requested) for ids in texts], kind="embeddings")
    return [future.result().arrays[0] for future in futures]


def measure_engine(setting: Setting) -> None:
    """Print tokens per second by precision, batch limit and number of lanes."""
    print("| precision | lanes | max-batch-tokens | " + " | ".join(setting.texts) + " | GPU memory, MiB |")
    print("|---|---|---|" + "---|" * (len(setting.texts) + 1))
    for precision in PRECISIONS:
        for lanes in (1, 2):
            limits = setting.batch_tokens if lanes == 1 else setting.batch_tokens[1:6:2]
            for limit in limits:
                with open_engine(setting, precision, max_batch_tokens=limit, lanes=lanes) as engine:
                    cells = []
                    for texts in setting.texts.values():
                        seconds = median_s(lambda: embed(engine, texts), setting.repetitions)  # noqa: B023
                        cells.append(f"{sum(map(len, texts)) / seconds:,.0f}")
                    cells.append(gpu_memory(setting))
                print(f"| {precision} | {lanes} | {limit} | " + " | ".join(cells) + " |", flush=True)


def gpu_memory(setting: Setting) -> str:
    if setting.provider == "cpu":
        return "-"
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.check_output(query, text=True).strip()


# --- PyTorch --------------------------------------------------------------------------------------


def measure_torch(setting: Setting) -> None:
    """Print tokens per second of transformers with SDPA by data type and batch limit."""
    import torch  # noqa: PLC0415 - the engine is measured without it
    from transformers import AutoModel  # noqa: PLC0415

    torch.backends.cuda.matmul.allow_tf32 = False
    print("| dtype | max-batch-tokens | " + " | ".join(setting.texts) + " | minimum cosine with fp32 |")
    print("|---|---|" + "---|" * (len(setting.texts) + 1))
    reference: npt.NDArray[np.float32] | None = None  # of the first data type
    for name in ("float32", "float16", "bfloat16"):
        model = AutoModel.from_pretrained(
            str(setting.checkpoint), attn_implementation="sdpa", dtype=getattr(torch, name)
        )
        model = model.eval().to(setting.provider)
        for limit in setting.batch_tokens:
            cells = []
            for texts in setting.texts.values():
                run = torch_runner(torch, model, texts, limit, setting.provider)
                seconds = median_s(run, setting.repetitions)
                cells.append(f"{sum(map(len, texts)) / seconds:,.0f}")
            vectors = torch_runner(torch, model, setting.texts["sentences"], limit, setting.provider)()
            reference = vectors if reference is None else reference
            cells.append(f"{smallest_cosine(vectors, reference):.6f}")
            print(f"| {name} | {limit} | " + " | ".join(cells) + " |", flush=True)
        del model


def torch_runner(
    torch: Any,  # noqa: ANN401 - a module
    model: Any,  # noqa: ANN401 - a class of transformers
    texts: Ids,
    limit: int,
    device: str,
) -> Callable[[], npt.NDArray[np.float32]]:
    """Return a function that embeds the texts and returns their vectors in host memory."""
    batches = sorted_batches(texts, limit)

    def run() -> npt.NDArray[np.float32]:
        parts = []
        with torch.inference_mode():
            for batch in batches:
                inputs = pad([Item(texts[index], ()) for index in batch], len(texts[batch[-1]]), 0)
                ids, mask = (torch.from_numpy(array).to(device) for array in inputs[:2])
                hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
                weights = mask[..., None].to(hidden.dtype)
                parts.append((hidden * weights).sum(1) / weights.sum(1))
            vectors: npt.NDArray[np.float32] = torch.cat(parts).float().cpu().numpy()
        result = np.empty_like(vectors)
        result[[index for batch in batches for index in batch]] = vectors
        return result

    return run


def sorted_batches(texts: Ids, limit: int) -> list[list[int]]:
    """Return batches of text indices, sorted by length, with at most `limit` padded tokens."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
        if batches[-1] and (len(batches[-1]) + 1) * len(texts[index]) > limit:
            batches.append([])
        batches[-1].append(index)
    return batches


def smallest_cosine(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    return float(((found * expected).sum(-1) / norms).min())


# --- overhead -------------------------------------------------------------------------------------


def measure_overhead(setting: Setting) -> None:
    """Print the time of one batch: computation alone, with copies, and with pooling."""
    print("| precision | batch | kept on the GPU, ms | copied to the host, ms | pooled, ms | copied, MB |")
    print("|---|---|---|---|---|---|")
    shapes = [(1, 16), (8, 16), (64, 16), (512, 16), (1, 128), (64, 128), (1, 512), (16, 512), (64, 512)]
    bundle = {name: open_bundle(setting.bundle, name) for name in PRECISIONS}
    for precision in PRECISIONS:
        graph = bundle[precision].graph_path("embeddings")
        session = OnnxSession(graph, cast("Any", setting.provider), threads=0, device_id=0)
        for size, length in shapes[:2] if setting.quick else shapes:
            items = [Item(np.full(length, 1000 + row), ()) for row in range(size)]
            inputs = pad(items, length, 0)
            times = batch_times(session, inputs, items, setting)
            megabytes = size * length * 384 * 4 / 1e6
            cells = " | ".join(f"{1000 * seconds:.2f}" for seconds in times)
            print(f"| {precision} | {size} x {length} | {cells} | {megabytes:.1f} |", flush=True)


def batch_times(session: OnnxSession, inputs: Any, items: list[Item], setting: Setting) -> list[float]:  # noqa: ANN401 - a named tuple of arrays
    feed = feed_of(inputs, session.inputs)
    requested = RequestedOutput("last_hidden_state", keep=TokenPooling(Pooling.MEAN))

    def keep() -> None:
        binding = session._session.io_binding()  # noqa: SLF001 - the server always copies
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("last_hidden_state", setting.provider, 0)
        session._session.run_with_iobinding(binding)  # noqa: SLF001

    def copy() -> None:
        session.run(inputs, ["last_hidden_state"])

    def pooled() -> None:
        outputs = session.run(inputs, ["last_hidden_state"])
        for row, item in enumerate(items):
            outputs.part(row, item.num_tokens, requested)

    return [median_s(run, 2 if setting.quick else 20) for run in (keep, copy, pooled)]


# --- attention ------------------------------------------------------------------------------------


def measure_attention(setting: Setting) -> None:
    """Print texts per second with attention weights, by the largest size that is copied as a whole."""
    selections = {
        "all heads": (HeadSelection(), 6),
        "one head of a layer": (HeadSelection((3,)), 1),
        "mean of heads": (HeadSelection(is_mean=True), 6),
    }
    limits = {"selected": 0, "1 MiB": 1 << 20, "4 MiB": 1 << 22, "copied": 1 << 40}
    print("| texts | selection | " + " | ".join(limits) + " |\n|---|---|" + "---|" * len(limits))
    with open_engine(setting, max_batch_tokens=8192, lanes=1) as engine:
        session = engine.lanes["attention"].sessions.get(has_whole_machine=True)
        for name, ids in setting.texts.items():
            texts = ids[: {"sentences": 512, "passages": 128, "long": 32}[name]]
            for selected, (selection, count) in selections.items():
                cells = []
                for limit in limits.values():
                    if isinstance(session, DeviceSession):
                        session.copied_bytes = limit
                    run = attention_runner(engine, texts, selection, count)
                    seconds = median_s(run, min(3, setting.repetitions))
                    cells.append(f"{len(texts) / seconds:,.0f}")
                print(f"| {len(texts)} {name} | {selected} | " + " | ".join(cells) + " |", flush=True)


def attention_runner(engine: Engine, texts: Ids, selection: HeadSelection, count: int) -> Callable[[], None]:
    model = engine._bundle.model  # noqa: SLF001
    outputs = [output for output in model.graphs["attention"].outputs if output.num_heads][-count:]
    requested = tuple(RequestedOutput(output.name, output.layout, selection) for output in outputs)

    def run() -> None:
        futures = engine.submit([Item(ids, requested) for ids in texts], kind="attention")
        for future in futures:
            future.result()

    return run


def measure_torch_attention(setting: Setting) -> None:
    """Print texts per second of transformers with eager attention, with all weights in host memory."""
    import torch  # noqa: PLC0415
    from transformers import AutoModel  # noqa: PLC0415

    torch.backends.cuda.matmul.allow_tf32 = False
    model: Any = AutoModel.from_pretrained(str(setting.checkpoint), attn_implementation="eager")
    model = model.eval().to(setting.provider)
    print("| texts | all heads, texts/s |\n|---|---|")
    for name, ids in setting.texts.items():
        texts = ids[: {"sentences": 512, "passages": 128, "long": 32}[name]]
        batches = sorted_batches(texts, 8192)

        def run(texts: Ids = texts, batches: list[list[int]] = batches) -> None:
            with torch.inference_mode():
                for batch in batches:
                    inputs = pad([Item(texts[index], ()) for index in batch], len(texts[batch[-1]]), 0)
                    tokens, mask = (torch.from_numpy(array).to(setting.provider) for array in inputs[:2])
                    output = model(input_ids=tokens, attention_mask=mask, output_attentions=True)
                    layers = [layer.cpu().numpy() for layer in output.attentions]
                    for row, index in enumerate(batch):
                        size = len(texts[index])
                        _ = [np.array(layer[row, :, :size, :size]) for layer in layers]

        print(f"| {len(texts)} {name} | {len(texts) / median_s(run, min(3, setting.repetitions)):,.0f} |")


# --- the server -----------------------------------------------------------------------------------


def measure_server(setting: Setting) -> None:
    """Print requests per second of 64 gRPC clients in four processes."""
    print("| server | request | requests/s | p50, ms | p99, ms | difference from alone | errors |")
    print("|---|---|---|---|---|---|---|")
    servers: list[tuple[str, Precision, list[str]]] = [
        ("CPU", "fp32", ["--provider", "cpu"]),
        ("CUDA, 1 lane", "fp32", ["--provider", setting.provider, "--lanes", "1"]),
        ("CUDA, 2 lanes", "fp32", ["--provider", setting.provider, "--lanes", "2"]),
        ("CUDA fp16, 2 lanes", "fp16", ["--provider", setting.provider, "--lanes", "2"]),
    ]
    for label, precision, options in servers:
        with attnlens_server(setting.bundle, precision, 0, LOG / "cuda.log", *options) as server:
            for what, workload in (("embed", "sentences"), ("attention", "sentences"), ("embed", "passages")):
                texts = setting.strings[workload][:512]
                lengths = [len(ids) for ids in setting.texts[workload][:512]]
                found = load(server.address, what, texts, lengths, 1.0 if setting.quick else 2.0)
                print(f"| {label} | {what}, {workload} | {found} |", flush=True)


def load(address: str, what: str, texts: list[str], lengths: list[int], seconds: float) -> str:
    """Run 4 processes of 16 clients at the same time, and return the cells of a row."""
    generator = [sys.executable, "-m", "bench.load.generator"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(LineProcess(generator, {}, LOG / f"cuda-load-{index}.log"))
            for index in range(4)
        ]
        for process in processes:
            process.request(
                do="prepare",
                key="k",
                texts=texts,
                lengths=lengths,
                num_layers=6,
                texts_per_request=1,
                check_every=16,
                protocol="grpc",
                what=what,
                address=address,
            )
        for process in processes:
            assert process._process is not None  # noqa: SLF001 - all four run at the same time
            assert process._process.stdin is not None  # noqa: SLF001
            request = {"do": "closed", "key": "k", "clients": 16, "seconds": seconds, "settle_s": 1.0}
            process._process.stdin.write(json.dumps(request) + "\n")  # noqa: SLF001
            process._process.stdin.flush()  # noqa: SLF001
        results = [process._read() for process in processes]  # noqa: SLF001
    rate = sum(result["texts"] / result["seconds"] for result in results)
    p50, p99 = (statistics.mean(result["latency_ms"][name] for result in results) for name in ("p50", "p99"))
    difference = max(result["max_abs_difference_from_alone"] for result in results)
    errors = sum((Counter(result["errors"]) for result in results), Counter[str]())
    return f"{rate:,.0f} | {p50:.1f} | {p99:.1f} | {difference:.1e} | {dict(errors) or 'none'}"


PARTS: dict[str, Callable[[Setting], None]] = {
    "overhead": measure_overhead,
    "engine": measure_engine,
    "torch": measure_torch,
    "attention": measure_attention,
    "torch attention": measure_torch_attention,
    "server": measure_server,
}

if __name__ == "__main__":
    main()
