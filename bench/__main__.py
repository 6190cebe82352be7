"""Entry point of `make bench`: compares the engine and server with other programs in one run.

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
    run_optional,
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
    result = new_result(settings)
    for setting in settings:
        add_model(result, setting.model, measure(setting, arguments.rows, arguments.soak))
    computed = targets(Rows(result["rows"]), result["extras"])
    result["targets"] = [as_json(target) for target in computed]
    result["seconds"] = round(time.monotonic() - started)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.output / "results.md").write_text(report(result) + "\n", encoding="utf-8")
    draw_chart(result, arguments.output / "results.png")
    print(report(result))
    print(f"Finished in {result['seconds']} s. Results: {arguments.output}/results.{{json,md,png}}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="See bench/README.md.")
    parser.add_argument("--quick", action="store_true", help="Smoke test: few texts and short measurements.")
    parser.add_argument(
        "--model", choices=["all", *MODELS], default="all", help="Model to measure. Defaults to all."
    )
    parser.add_argument(
        "--rows",
        default="",
        help="Regular expression that selects rows, e.g. 'attnlens|fastembed.*passages'.",
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        default=Path("bundles/minilm"),
        help="MiniLM bundle. Exported if it does not exist.",
    )
    parser.add_argument("--output", type=Path, default=default_output(), help="Directory for the results.")
    parser.add_argument(
        "--threads", type=int, default=0, help="Number of threads. Defaults to 0, one per core."
    )
    parser.add_argument("--repetitions", type=int, help="Measurements per row.")
    parser.add_argument(
        "--soak", type=int, default=0, metavar="N", help="Run a soak test with N additional texts."
    )
    return parser.parse_args()


def measure(setting: Setting, rows: str, soak_texts: int) -> dict[str, Any]:
    """Start all programs for a model, measure all rows and return the results in JSON form."""
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
            result |= measure_extras(field, soak_texts)
    return result | {"phases_s": durations([*phases, ("", time.monotonic())])}


def measure_extras(field: Field, soak_texts: int) -> dict[str, Any]:
    """Measure open loops, padding, memory and startup. Skips server metrics if no server was selected."""
    setting = field.setting
    served = [case for case in field.cases if isinstance(case, ServerCase) and not case.failure]
    points = measure_open_loops(served, setting)
    extras: dict[str, Any] = {"padding_share": run_optional("Padding", lambda: measure_padding(field))}
    if served:
        extras["rss_mib"] = run_optional("Memory", lambda: measure_memory(field)) or {}
        extras["start_to_first_answer_s"] = run_optional("Starts", lambda: measure_starts(setting))
    if soak_texts:
        extras["soak"] = run_optional("Soak", lambda: measure_soak(served, soak_texts)) or {}
    return {"open_loop": points, "extras": extras}


def add_model(result: dict[str, Any], model: str, measured: dict[str, Any]) -> None:
    """Merge the measurements of one model into the result."""
    for name in ("workloads", "versions", "phases_s"):
        result[name][model] = measured[name]
    for name in ("rows", "open_loop"):
        result[name] += measured.get(name, [])
    result["extras"] |= measured.get("extras", {})


def durations(phases: Sequence[tuple[str, float]]) -> dict[str, int]:
    """Return the duration of each phase from the start times. The last entry marks the end."""
    return {name: round(end - start) for (name, start), (_, end) in pairwise(phases)}


def new_result(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return a result with the machine and settings filled in and no measurements."""
    first = settings[0]
    return {
        "machine": {
            "processor": describe_processor(),
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


def describe_processor() -> str:
    """Return the processor name and its relevant instruction sets."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    known = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}
    supported = sorted(known & set(fields.get("flags", "").split()))
    return f"{fields.get('model name', platform.machine())} ({', '.join(supported)})"


if __name__ == "__main__":
    main()
