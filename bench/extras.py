"""What is measured beside the rows: open loops, padding, memory over a long time."""

import sys
from collections.abc import Sequence
from typing import Any

from bench.cases import RowKey, ServerCase
from bench.field import MANY, SERVER, Field
from bench.setting import Setting
from bench.targets import Row

WARM_UP_TEXTS = 4_000


def measure_open_loops(cases: Sequence[ServerCase], setting: Setting) -> list[Row]:
    """Send at fixed rates, from a quarter of what 64 clients in a closed loop got to more than that."""
    points = []
    for case in cases:
        key = case.key
        if (key.name, key.precision, key.clients) != (SERVER, "fp32", MANY) or key.workload == "passages":
            continue
        capacity = case.row()["texts_per_s"]["median"]
        print(f"Open loop, {key} ...", file=sys.stderr, flush=True)
        for share in setting.open_loop_shares:
            rate = float(f"{share * capacity:.2g}")
            points.append(case.measure_open(rate, 2 * setting.seconds))
    return points


def measure_padding(field: Field) -> float:
    """Return the share of padding in the tokens that the engine computes with 64 texts waiting."""
    texts = field.setting.workloads["mixed"].texts
    answer = field.engine.ask(texts=texts, max_waiting=MANY)
    return 1 - float(answer["live_tokens"]) / float(answer["computed_tokens"])


def measure_soak(cases: Sequence[ServerCase], num_texts: int) -> dict[str, Any]:
    """Send texts of very different lengths from 64 clients, and compare the memory before and after.

    Every reply is compared with that to the same text alone.
    """
    key = RowKey(SERVER, "fp32", "embed", "mixed", MANY)
    case = next((each for each in cases if each.key == key), None)
    if case is None:
        return {}
    print(f"Soak, {num_texts} texts ...", file=sys.stderr, flush=True)
    case.check_all()
    case.send(MANY, min(WARM_UP_TEXTS, num_texts))
    warm_mib = case.server.rss_mib
    answer = case.send(MANY, num_texts)
    rss = {"rss_mib_warm": warm_mib, "rss_mib_after": case.server.rss_mib}
    return answer | rss | {"rss_ratio": rss["rss_mib_after"] / warm_mib}
