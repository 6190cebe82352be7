"""Measurements beside the rows: open loops, padding, memory."""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from bench.cases import Row, RowKey, ServerCase, merge
from bench.contestants import SERVER
from bench.field import MANY, OUR_SERVERS, Field, log_of, server_name
from bench.lines import ProcessError
from bench.servers import seconds_to_first_answer
from bench.setting import Setting

WARM_UP_TEXTS = 4_000
MEMORY_TEXTS = 2_000
PORTION_TEXTS = 10_000  # the memory is read after so many texts

T = TypeVar("T")


def tried(what: str, measure: Callable[[], T]) -> T | None:
    """Return what `measure` returns; a failure is printed and gives None, so earlier results are kept."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    try:
        return measure()
    except ProcessError as error:
        print(f"{what} failed: {error}", file=sys.stderr, flush=True)
        return None


def measure_open_loops(cases: Sequence[ServerCase], setting: Setting) -> list[Row]:
    """Put load on a server at fixed rates, for each kind of request."""
    chosen = [
        case
        for case in cases
        if (case.key.name, case.key.precision, case.key.clients) == (SERVER, "fp32", MANY)
        and case.key.workload != "passages"
    ]
    points: list[Row] = []
    for case in chosen:
        points += tried(f"Open loop, {case.key}", partial(measure_open_loop, case, setting)) or []
    return points


def measure_open_loop(case: ServerCase, setting: Setting) -> list[Row]:
    """Send at rates from a quarter of the rate of 64 clients in a closed loop to more than that rate."""
    capacity = case.row()["texts_per_s"]["median"]
    rates = [float(f"{share * capacity:.2g}") for share in setting.open_loop_shares]
    return [case.measure_open(rate, 2 * setting.seconds) for rate in rates]


def measure_padding(field: Field) -> float:
    """Return the share of padding in the tokens that the engine computes with 64 texts waiting."""
    texts = field.setting.workloads["mixed"].texts
    answer = field.engine.request(texts=texts, max_waiting=MANY)
    return 1 - float(answer["live_tokens"]) / float(answer["computed_tokens"])


def measure_soak(cases: Sequence[ServerCase], num_texts: int) -> dict[str, Any]:
    """Send texts of very different lengths from 64 clients, and compare the memory before and after.

    Every reply is compared with that to the same text alone.
    """
    key = RowKey(SERVER, "fp32", "embed", "mixed", MANY)
    case = next((case for case in cases if case.key == key), None)
    if case is None:
        return {}
    case.check_all()
    case.send(MANY, min(WARM_UP_TEXTS, num_texts))
    rss_mib, answers = [case.server.rss_mib], []
    for start in range(0, num_texts, PORTION_TEXTS):
        answers.append(case.send(MANY, min(PORTION_TEXTS, num_texts - start)))
        rss_mib.append(case.server.rss_mib)
    return merge(answers) | {
        "texts": sum(answer["texts"] for answer in answers),
        "rss_mib": rss_mib,
        "rss_ratio": rss_mib[-1] / rss_mib[0],
    }


def measure_memory(field: Field) -> dict[str, float]:
    """Return the resident memory, in MiB, that each server has after the same texts from 64 clients."""
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
    """Return the median of how long it takes from the start of a server to its first answer."""
    log = log_of("start")
    return statistics.median(
        seconds_to_first_answer(setting.bundle, setting.our_threads, log) for _ in range(3)
    )
