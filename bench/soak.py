"""Many clients at once: no errors, everybody's own vectors, and what the server costs.

    python bench/soak.py BUNDLE [--clients 64] [--seconds 60]

Starts `attnlens serve BUNDLE`, lets each client send one text at a time, of mixed lengths, for the given
time, and compares every vector with that of the same text alone. Beside it, in the same run and with the
same threads, the same graph is called in-process: one text at a time, and in batches packed like the
server's. Prints JSON.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from attnlens_client import AsyncClient, Client
from attnlens_server.engine.pack import BatchLimits, pack
from attnlens_server.engine.session import Session

PASSAGES = Path(__file__).parents[1] / "tests" / "data" / "passages.jsonl"
BATCH_TOKENS = 512

FloatArray = npt.NDArray[np.float32]


def main() -> None:
    arguments = parse_arguments()
    texts = [json.loads(line)["text"] for line in PASSAGES.read_text(encoding="utf-8").splitlines()]
    lengths, ids = tokenize(arguments.bundle, texts, arguments.max_tokens)
    started = time.perf_counter()
    command = [Path(sys.executable).parent / "attnlens", "serve", arguments.bundle, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" is ready at ")[1].split(": ")[0]
            ready_s = time.perf_counter() - started
            with Client(address) as client:
                expected = np.concatenate([client.embed([text], truncate=True) for text in texts])
                first_answer_rss = rss_mib(server.pid)
            load = asyncio.run(run_clients(address, texts, expected, arguments))
            rss = rss_mib(server.pid)
            cpu_s = cpu_seconds(server.pid)
        finally:
            server.terminate()
    served_tokens = sum(lengths[index] for index in load.pop("indices"))
    in_process = measure_in_process(arguments.bundle, ids, lengths)
    served = served_tokens / load["seconds"]
    print(
        json.dumps(
            {
                **load,
                "tokens_per_s_served": round(served),
                **{name: round(rate) for name, rate in in_process.items()},
                "served_to_packed_in_process": round(served / in_process["tokens_per_s_packed"], 3),
                "process_start_to_ready_s": round(ready_s, 2),
                "rss_mib_warm": first_answer_rss,
                "rss_mib_after": rss,
                "server_cpu_s": cpu_s,
                "exit_code": server.returncode,
            },
            indent=2,
        )
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Load a server with many clients and check every answer.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--max-tokens", type=int, default=256, help="where the bundle cuts")
    return parser.parse_args()


async def run_clients(
    address: str, texts: list[str], expected: FloatArray, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Let each client send text after text until the time is over."""
    indices: list[int] = []
    latencies_ms: list[float] = []
    errors: list[str] = []
    worst = 0.0
    end = time.perf_counter() + arguments.seconds

    async def client_loop(client: AsyncClient, seed: int) -> None:
        nonlocal worst
        random = np.random.default_rng(seed)
        while time.perf_counter() < end:
            index = int(random.integers(len(texts)))
            sent = time.perf_counter()
            try:
                [vector] = await client.embed([texts[index]], truncate=True)
            except Exception as error:  # noqa: BLE001 - every failure counts
                errors.append(repr(error))
                continue
            latencies_ms.append((time.perf_counter() - sent) * 1000)
            worst = max(worst, float(np.abs(vector - expected[index]).max()))
            indices.append(index)

    started = time.perf_counter()
    async with AsyncClient(address) as client:
        await asyncio.gather(*(client_loop(client, seed) for seed in range(arguments.clients)))
    centiles = statistics.quantiles(latencies_ms, n=100)
    return {
        "clients": arguments.clients,
        "seconds": round(time.perf_counter() - started, 2),
        "texts": len(indices),
        "errors": len(errors),
        "first_errors": errors[:3],
        "max_abs_difference_from_alone": worst,
        "latency_ms": {
            name: round(centiles[at - 1], 1) for name, at in (("p50", 50), ("p95", 95), ("p99", 99))
        },
        "indices": indices,
    }


def tokenize(
    bundle: Path, texts: list[str], max_tokens: int
) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
    """Return the length and ids of each text, cut like the server does."""
    tokenizer = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    ids = [np.asarray(each.ids, dtype=np.int64) for each in tokenizer.encode_batch(texts)]
    return [len(each) for each in ids], ids


def measure_in_process(
    bundle: Path, ids: list[npt.NDArray[np.int64]], lengths: list[int]
) -> dict[str, float]:
    """Return tokens per second of the bare graph over all texts, best of three."""
    session = Session(bundle / "onnx" / "model.onnx", "cpu", threads=0, device_id=0)
    waiting, packed = list(range(len(ids))), []
    while waiting:
        window = waiting[:64]
        chosen = [
            window[each] for each in pack([lengths[index] for index in window], BatchLimits(BATCH_TOKENS))
        ]
        packed.append(chosen)
        waiting = [index for index in waiting if index not in set(chosen)]
    alone = [[index] for index in range(len(ids))]
    rates = {}
    for name, batches in (("tokens_per_s_alone", alone), ("tokens_per_s_packed", packed)):
        seconds = min(time_batches(session, ids, batches) for _ in range(3))
        rates[name] = sum(lengths) / seconds
    return rates


def time_batches(session: Session, ids: list[npt.NDArray[np.int64]], batches: list[list[int]]) -> float:
    started = time.perf_counter()
    for batch in batches:
        shape = (len(batch), max(len(ids[index]) for index in batch))
        input_ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, index in enumerate(batch):
            input_ids[row, : len(ids[index])] = ids[index]
            mask[row, : len(ids[index])] = 1
        session.run(input_ids, mask, ["last_hidden_state"])
    return time.perf_counter() - started


def rss_mib(pid: int) -> int:
    """Return the resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    main()
