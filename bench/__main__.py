"""`make bench`: our engine and server beside other programs for the same task, in one run.

python -m bench [--quick] [--model minilm|base] [--rows PATTERN] [--bundle DIR] [--output DIR] [--threads N]
                [--repetitions N] [--soak N]
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.cases import MINILM, ServerCase, interleave, prepare_all
from bench.extras import (
    measure_memory,
    measure_open_loops,
    measure_padding,
    measure_soak,
    measure_starts,
    tried,
)
from bench.field import Field
from bench.setting import MODELS, Setting, default_output, make_settings
from bench.show.chart import draw_chart
from bench.show.report import report
from bench.show.targets import Rows, as_json, targets


def main() -> None:
    arguments = parse_arguments()
    started = time.monotonic()
    models = list(MODELS) if arguments.model == "all" else [arguments.model]
    settings = make_settings(
        models, arguments.bundle, arguments.threads, arguments.repetitions, quick=arguments.quick
    )
    result = describe(settings)
    for setting in settings:
        add(result, setting.model, measure(setting, arguments.rows, arguments.soak))
    computed = targets(Rows(result["rows"]), result["extras"])
    result["targets"] = [as_json(target) for target in computed]
    result["seconds"] = round(time.monotonic() - started)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.output / "results.md").write_text(report(result) + "\n", encoding="utf-8")
    draw_chart(result, arguments.output / "results.png")
    print(report(result))
    print(f"{result['seconds']} s in all; results.json, results.md and results.png are in {arguments.output}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="See bench/README.md.")
    parser.add_argument("--quick", action="store_true", help="few texts, short loops: does everything run?")
    parser.add_argument("--model", choices=["all", *MODELS], default="all", help="the others are left out")
    parser.add_argument(
        "--rows", default="", help="a regular expression, e.g. 'attnlens|fastembed.*passages'"
    )
    parser.add_argument("--bundle", type=Path, default=Path("bundles/minilm"), help="exported where absent")
    parser.add_argument("--output", type=Path, default=default_output())
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are cores")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="N texts more, watching the memory")
    return parser.parse_args()


def measure(setting: Setting, rows: str, soak_texts: int) -> dict[str, Any]:
    """Start all programs for a model, measure all rows, return what results.json has of them."""
    with ExitStack() as stack:
        field = Field(setting, rows, stack)
        phases = [("start", time.monotonic())]
        field.fill()
        phases.append(("prepare", time.monotonic()))
        prepare_all(field.cases)
        phases.append(("repetitions", time.monotonic()))
        interleave(field.cases, setting.repetitions)
        phases.append(("rest", time.monotonic()))
        result: dict[str, Any] = {
            "workloads": {name: workload.describe() for name, workload in setting.workloads.items()},
            "versions": field.versions,
            "rows": [case.row() for case in field.cases],
        }
        if setting.model == MINILM:
            result |= measure_rest(field, soak_texts)
    return result | {"phases_s": durations([*phases, ("", time.monotonic())])}


def measure_rest(field: Field, soak_texts: int) -> dict[str, Any]:
    """Measure what is no row: open loops, padding, memory, starts. Servers that were left out have none."""
    setting = field.setting
    served = [case for case in field.cases if isinstance(case, ServerCase) and not case.failure]
    points = measure_open_loops(served, setting)
    extras: dict[str, Any] = {"padding_share": tried("Padding", lambda: measure_padding(field))}
    if served:
        extras["rss_mib"] = tried("Memory", lambda: measure_memory(field)) or {}
        extras["start_to_first_answer_s"] = tried("Starts", lambda: measure_starts(setting))
    if soak_texts:
        extras["soak"] = tried("Soak", lambda: measure_soak(served, soak_texts)) or {}
    return {"open_loop": points, "extras": extras}


def add(result: dict[str, Any], model: str, found: dict[str, Any]) -> None:
    """Add what was found with a model."""
    for name in ("workloads", "versions", "phases_s"):
        result[name][model] = found[name]
    for name in ("rows", "open_loop"):
        result[name] += found.get(name, [])
    result["extras"] |= found.get("extras", {})


def durations(phases: Sequence[tuple[str, float]]) -> dict[str, int]:
    """Return how long each phase took, given when each one began; the last entry is the end."""
    return {name: round(end - start) for (name, start), (_, end) in pairwise(phases)}


def describe(settings: Sequence[Setting]) -> dict[str, Any]:
    """Say what is measured, and on what; the rest is empty."""
    first = settings[0]
    return {
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "threads": first.threads,
        "repetitions": first.repetitions,
        "models": {setting.model: setting.manifest.model_name for setting in settings},
        "workloads": {},
        "versions": {},
        "phases_s": {},
        "rows": [],
        "open_loop": [],
        "extras": {},
    }


def processor() -> str:
    """Return the processor's name and those of its instruction sets that matter here."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    known = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}
    has = sorted(known & set(facts.get("flags", "").split()))
    return f"{facts.get('model name', platform.machine())} ({', '.join(has)})"


if __name__ == "__main__":
    main()
