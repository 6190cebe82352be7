"""What `attnlens bench --json` prints."""

import dataclasses
from typing import Any

from attnlens_cli.show.bench.commands import ServeCommand
from attnlens_server.tuning import Comparison, Measured, Report, Workload


def report_json(report: Report, workload: Workload, commands: list[ServeCommand]) -> dict[str, Any]:
    """Return the measurements as JSON values."""
    return {
        "device": report.device,
        "texts": {
            "source": workload.description,
            "count": len(workload.input_ids),
            "cut": workload.num_cut,
            "mean_tokens": workload.mean_tokens,
            **{f"p{share}_tokens": workload.quantile_tokens(share / 100) for share in (50, 90, 99, 100)},
        },
        "in_flight": report.num_in_flight,
        "comparison": _comparison(report.comparison) if report.comparison else None,
        "graph": [dataclasses.asdict(cell) | {"tokens_per_s": cell.tokens_per_s} for cell in report.grid],
        "settings": [
            dataclasses.asdict(speed.setting)
            | {
                "weight_copies": speed.setting.num_weight_copies,
                "tokens_per_s": speed.median_tokens_per_s,
                "texts_per_s": speed.median_tokens_per_s / workload.mean_tokens,
                "padding_share": speed.padding_share,
                "repetitions_tokens_per_s": speed.tokens_per_s,
            }
            for speed in report.speeds
        ],
        "best": dataclasses.asdict(report.best.setting),
        "loads": [dataclasses.asdict(load) for load in report.loads],
        "serve": [_serve(command) for command in commands],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "accuracy_texts": {
            "source": comparison.sample.description,
            "count": len(comparison.sample.input_ids),
            "are_real": comparison.sample.are_real,
        },
        "alone_tokens": comparison.alone_tokens,
        "engines": [_measured(row, comparison.rows[0]) for row in comparison.rows],
        "left_out": [
            dataclasses.asdict(left_out.variant) | {"reason": left_out.reason}
            for left_out in comparison.left_out
        ],
    }


def _measured(row: Measured, reference: Measured) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row.variant),
        "device": row.device,
        "tokens_per_s": row.tokens_per_s,
        "relative_speed": row.speed_relative_to(reference),
        "mean_cosine": row.accuracy.mean_cosine,
        "smallest_cosine": row.accuracy.smallest_cosine,
        "alone_ms": row.alone_ms,
        "memory_bytes": row.memory_bytes,
        "is_checked": row.is_checked,
        "rounds_tokens_per_s": [turn.tokens_per_s for turn in row.turns],
        "rounds_alone_ms": [turn.alone_ms for turn in row.turns],
    }


def _serve(command: ServeCommand) -> dict[str, Any]:
    offer = command.offer
    return {
        "accuracy": offer.tier.name if offer and offer.tier else None,
        "relative_speed": offer.relative_speed if offer else None,
        "is_tuned": command.is_tuned,
        "check_command": command.check,
        "command": command.command,
    }
