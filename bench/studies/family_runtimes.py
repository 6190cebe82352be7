"""Generates the table of model families and runtimes in docs/runtimes.md.

    python -m bench.studies.family_runtimes NODE_MODULES [FAMILY ...]

Each family is exported with odd sizes and random weights, as in tests/export/test_families.py, and run in
fp32 on the small grid in every installed runtime. Runtimes without fp32 report their minimum cosine instead.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from attnlens_export.graph.names import HIDDEN_OUTPUT
from attnlens_export.runtimes import ALL, RuntimeOptions, RuntimeResult, find_runtimes
from attnlens_runtimes import FP32
from export.test_families import Exported
from family_cases import EXPORTED
from runtimes.measured import measure


def cell(result: RuntimeResult) -> str:
    """Return the maximum errors of hidden states and attention, or the reason for a failure."""
    if result.stops:
        return next(iter(result.stops.values()))
    verdict = "" if result.passed else " **failed**"
    if result.precision != FP32:
        cosines = (errors.min_cosine for errors in result.errors if errors.role == HIDDEN_OUTPUT)
        return f"{result.precision}: {min(cosines):.6f}{verdict}"
    hidden, others = (
        max(errors.max_abs_error for errors in result.errors if (errors.role == HIDDEN_OUTPUT) is is_hidden)
        for is_hidden in (True, False)
    )
    return f"{hidden:.1e} / {others:.1e}{verdict}"


def main() -> None:
    """Print one table row per family."""
    node_modules, *families = sys.argv[1:]
    runtimes, _ = find_runtimes(RuntimeOptions((ALL,), Path(node_modules)))
    print("| family | " + " | ".join(runtime.name for runtime in runtimes) + " |")
    print("|" + "---|" * (len(runtimes) + 1))
    for family in families or EXPORTED:
        with tempfile.TemporaryDirectory() as directory:
            bundle = Exported(family, Path(directory)).bundle
            cells = [cell(measure(bundle, runtime)) for runtime in runtimes]
        print(f"| {family} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
