"""Additional measurements: open loops, padding, memory, soak and startup."""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from bench.cases import Row, RowKey, ServerCase, merge
from bench.contestants import SERVER
from bench.field import MANY, OUR_SERVERS, Field, log_path, server_name
from bench.lines import ProcessError
from bench.servers import time_to_first_response
from bench.setting import Setting

WARM_UP_TEXTS = 4_000
MEMORY_TEXTS = 2_000
PORTION_TEXTS = 10_000  # texts between two memory readings

T = TypeVar("T")


def run_optional(what: str, measure: Callable[[], T]) -> T | None:
    """Return the result of `measure`, or print the error and return None if it fails."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    try:
        return measure()
    except ProcessError as error:
        print(f"{what} failed: {error}", file=sys.stderr, flush=True)
        return None


def measure_open_loops(cases: Sequence[ServerCase], setting: Setting) -> list[Row]:
    """Measure the server at fixed arrival rates for each kind of request."""
    chosen = [
        case
        for case in cases
        if (case.key.name, case.key.precision, case.key.clients) == (SERVER, "fp32", MANY)
        and case.key.workload != "passages"
    ]
    points: list[Row] = []
    for case in chosen:
        points += run_optional(f"Open loop, {case.key}", partial(measure_open_loop, case, setting)) or []
    return points


def measure_open_loop(case: ServerCase, setting: Setting) -> list[Row]:
    """Measure at fractions of the closed-loop throughput of 64 clients."""
    capacity = case.row()["texts_per_s"]["median"]
    rates = [float(f"{share * capacity:.2g}") for share in setting.open_loop_shares]
    return [case.measure_open(rate, 2 * setting.seconds) for rate in rates]


def measure_padding(field: Field) -> float:
    """Return the fraction of computed tokens that are padding, with 64 texts queued."""
    texts = field.setting.workloads["mixed"].texts
    response = field.engine.request(texts=texts, max_waiting=MANY)
    return 1 - float(response["live_tokens"]) / float(response["computed_tokens"])


def measure_soak(cases: Sequence[ServerCase], num_texts: int) -> dict[str, Any]:
    """Run a soak test with 64 clients and mixed text lengths, and record the memory growth.

    Every response is verified against the same request sent alone.
    """
    key = RowKey(SERVER, "fp32", "embed", "mixed", MANY)
    case = next((case for case in cases if case.key == key), None)
    if case is None:
        return {}
    case.check_all()
    case.send(MANY, min(WARM_UP_TEXTS, num_texts))
    rss_mib, responses = [case.server.rss_mib], []
    for start in range(0, num_texts, PORTION_TEXTS):
        responses.append(case.send(MANY, min(PORTION_TEXTS, num_texts - start)))
        rss_mib.append(case.server.rss_mib)
    return merge(responses) | {
        "texts": sum(response["texts"] for response in responses),
        "rss_mib": rss_mib,
        "rss_ratio": rss_mib[-1] / rss_mib[0],
    }


def measure_memory(field: Field) -> dict[str, float]:
    """Return the resident memory of each server, in MiB, after the same load from 64 clients."""
    num_texts = min(MEMORY_TEXTS, 10 * len(field.setting.workloads["mixed"].texts))
    rss_mib = {}
    for engine, precision in OUR_SERVERS:
        key = RowKey(server_name(engine), precision, "embed", "mixed", MANY)
        with field.our_server(engine, precision) as server:
            case = field.server_case(server, key)
            case.prepare()
            case.send(MANY, num_texts)
            rss_mib[f"{key.name} {precision}"] = server.rss_mib
    return rss_mib


def measure_starts(setting: Setting) -> float:
    """Return the median time from server start to first response, in seconds."""
    log = log_path("start")
    return statistics.median(
        time_to_first_response(setting.bundle, setting.our_threads, log) for _ in range(3)
    )
