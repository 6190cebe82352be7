"""Synthetic benchmark rows and results."""

from collections.abc import Sequence
from typing import Any

from bench.accuracy import Accuracy, as_json


def make_row(
    name: str,
    rates: Sequence[float],
    precision: str = "fp32",
    *,
    cosines: tuple[float, float] | None = (1.0, 1.0),
    **more: object,
) -> dict[str, Any]:
    """Return an in-process MiniLM row for embedding passages. `more` overrides its fields."""
    key = {"name": name, "precision": precision, "what": "embed", "workload": "passages"}
    key |= {"clients": None, "model": "MiniLM", "failure": ""}  # type: ignore[dict-item]
    spread = {
        "median": sorted(rates)[len(rates) // 2],
        "min": min(rates),
        "max": max(rates),
        "all": list(rates),
    }
    units = dict.fromkeys(("texts_per_s", "tokens_per_s", "gflop_per_s"), spread)
    accuracy = {"accuracy": as_json(Accuracy(*cosines, texts=200))} if cosines else {}
    return {**key, **units, **accuracy, **more}


def make_result(rows: Sequence[dict[str, Any]], **more: object) -> dict[str, Any]:
    """Return the contents of a results.json with these rows."""
    sizes = {"texts": 2, "tokens": 30, "median_tokens": 15, "p90_tokens": 20, "max_tokens": 20}
    return {
        "machine": {"processor": "A processor (avx2)", "cores": 2},
        "threads": 2,
        "repetitions": 3,
        "models": {"MiniLM": "all-MiniLM-L6-v2"},
        "workloads": {"MiniLM": {"passages": sizes}},
        "rows": list(rows),
        "open_loop": [],
        "extras": {},
        "targets": [],
        **more,
    }
