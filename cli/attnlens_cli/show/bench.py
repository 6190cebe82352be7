"""Output of `attnlens bench`: the commands to copy, the tables, and JSON."""

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from attnlens_cli.printable import counted
from attnlens_cli.show.console import make_console, make_table
from attnlens_server.config import DEFAULT_DEVICE, ServerConfig
from attnlens_server.tuning import (
    EXACT,
    Comparison,
    Recommendation,
    Report,
    Setting,
    VariantResult,
    Workload,
    config_for,
    recommend,
)

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """Command that starts a server.

    Attributes:
        command: Command line.
        recommendation: Accuracy and speed. None if engines were not compared.
        is_tuned: Whether the command has the best settings. Otherwise it has the default settings.
        check: Command to run once before. None if the bundle was checked with this engine.
    """

    command: str
    recommendation: Recommendation | None
    is_tuned: bool
    check: str | None = None


def serve_commands(config: ServerConfig, report: Report) -> list[ServeCommand]:
    """Return a command for each recommended variant, or for the chosen one if engines were not compared."""
    tuned = tuned_command(config, report)
    if report.comparison is None:
        return [ServeCommand(tuned, None, is_tuned=True)]
    commands = []
    for recommendation in recommend(report.comparison.results, report.variant):
        result = recommendation.result
        variant, is_tuned = result.variant, result.variant == report.variant
        command = tuned if is_tuned else _serve(config_for(config, variant), result.device)
        check = ("attnlens", "check", os.fspath(config.bundle), "--engine", variant.engine)
        commands.append(
            ServeCommand(command, recommendation, is_tuned, None if result.is_checked else shlex.join(check))
        )
    return commands


def tuned_command(config: ServerConfig, report: Report) -> str:
    """Return the command that starts a server with the best settings."""
    return _serve(config, report.device, report.best.setting)


def _serve(config: ServerConfig, device: str, setting: Setting | None = None) -> str:
    options = _options(config, device, setting)
    return shlex.join(("attnlens", "serve", os.fspath(config.bundle), *options))


def _options(config: ServerConfig, device: str, setting: Setting | None) -> Iterator[str]:
    if config.engine != "onnxruntime":
        yield from ("--engine", config.engine)
    if config.device != DEFAULT_DEVICE:
        yield from ("--device", config.device)
    if config.engine == "onnxruntime" and device != DEFAULT_DEVICE:
        yield from ("--provider", "cuda")
    if config.device_id:
        yield from ("--device-id", str(config.device_id))
    if config.precision != "fp32":
        yield from ("--precision", config.precision)
    if setting is not None:
        yield from ("--threads", str(setting.threads), "--lanes", str(setting.lanes))
        yield from ("--max-batch-tokens", str(setting.max_batch_tokens))
    elif config.threads:
        yield from ("--threads", str(config.threads))


def report_json(config: ServerConfig, report: Report, workload: Workload) -> dict[str, Any]:
    """Return the measurements as JSON values."""
    return {
        "engine": config.engine,
        "precision": config.precision,
        "device": report.device,
        "texts": {
            "source": workload.description,
            "count": len(workload.input_ids),
            "cut": workload.num_truncated,
            "mean_tokens": workload.mean_tokens,
            **{
                f"p{percent}_tokens": workload.quantile_tokens(percent / 100) for percent in (50, 90, 99, 100)
            },
        },
        "in_flight": report.num_in_flight,
        "comparison": _comparison_json(report.comparison) if report.comparison else None,
        "settings": [
            {
                **asdict(result.setting),
                "tokens_per_s": result.median_tokens_per_s,
                "texts_per_s": result.median_tokens_per_s / workload.mean_tokens,
                "repetitions_tokens_per_s": result.tokens_per_s,
            }
            for result in report.results
        ],
        "best": asdict(report.best.setting),
        "serve": [_command_json(command) for command in serve_commands(config, report)],
        "command": tuned_command(config, report),
    }


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "accuracy_texts": {
            "source": comparison.sample.description,
            "count": len(comparison.sample.input_ids),
            "are_real": comparison.sample.are_real,
        },
        "alone_tokens": comparison.alone_tokens,
        "engines": [_result_json(result, comparison.results[0]) for result in comparison.results],
        "left_out": [asdict(variant) | {"reason": reason} for variant, reason in comparison.skipped.items()],
    }


def _result_json(result: VariantResult, reference: VariantResult) -> dict[str, Any]:
    return {
        **asdict(result.variant),
        "device": result.device,
        "tokens_per_s": result.tokens_per_s,
        "relative_speed": result.speed_relative_to(reference),
        **asdict(result.accuracy),
        "alone_ms": result.alone_ms,
        "memory_bytes": result.memory_bytes,
        "is_checked": result.is_checked,
        "rounds_tokens_per_s": [turn.tokens_per_s for turn in result.turns],
        "rounds_alone_ms": [turn.alone_ms for turn in result.turns],
    }


def _command_json(command: ServeCommand) -> dict[str, Any]:
    recommendation = command.recommendation
    return {
        "accuracy": recommendation.tier.name if recommendation and recommendation.tier else None,
        "relative_speed": recommendation.relative_speed if recommendation else None,
        "is_tuned": command.is_tuned,
        "check_command": command.check,
        "command": command.command,
    }


def show_report(report: Report, workload: Workload, model_name: str, commands: list[ServeCommand]) -> None:
    """Print the tables and the commands to copy."""
    console = make_console()
    cut = f"; {workload.num_truncated:,} longer ones were cut" if workload.num_truncated else ""
    p50, p90, longest = (workload.quantile_tokens(fraction) for fraction in (0.5, 0.9, 1))
    console.print(
        f"{model_name}, {workload.description}: tokens median {p50:,}, p90 {p90:,}, longest {longest:,}{cut}",
        soft_wrap=True,
    )
    if report.comparison is not None:
        _show_comparison(console, report.comparison)
    console.print()
    console.print(_settings_table(report, workload))
    console.print(
        "Measured in the engine, without gRPC, tokenization and pooling. Among settings within 3 % of the "
        "best, the one with the smallest batches and the fewest copies of the weights is chosen. Serve with:"
    )
    for command in commands:
        _show_command(console, command)


def _show_comparison(console: Console, comparison: Comparison) -> None:
    console.print()
    console.print(_comparison_table(comparison))
    sample = comparison.sample
    console.print(
        "relative: median of the ratios within each round. cosine: between these embeddings and those of "
        f"{comparison.results[0].variant}, {sample.description}. alone: one text of "
        f"{counted(comparison.alone_tokens, 'token')}. MiB: memory of a process with this engine alone."
    )
    if not sample.are_real:
        console.print("Cosines of random ids do not apply to real texts: measure yours with --texts FILE.")
    variants_by_reason: dict[str, list[str]] = {}
    for variant, reason in comparison.skipped.items():
        variants_by_reason.setdefault(reason, []).append(str(variant))
    for reason, variants in variants_by_reason.items():
        console.print(f"Not measured: {', '.join(variants)}: {reason}")


def _comparison_table(comparison: Comparison) -> Table:
    speeds, accuracies = ("tokens/s", "relative"), ("mean\ncosine", "smallest\ncosine")
    headings = ("engine", "precision", *speeds, *accuracies, "ms\nalone", "MiB")
    table = make_table("Engines and precisions, with default settings", headings[:2], headings[2:])
    for result in comparison.results:
        variant, device = result.variant, result.device
        table.add_row(
            variant.engine if device == DEFAULT_DEVICE else f"{variant.engine} on {device}",
            variant.precision,
            f"{result.tokens_per_s:,.0f}",
            f"{result.speed_relative_to(comparison.results[0]):.2f}",
            f"{result.accuracy.mean_cosine:.5f}",
            f"{result.accuracy.smallest_cosine:.5f}",
            f"{result.alone_ms:.1f}",
            "-" if result.memory_bytes is None else f"{result.memory_bytes / MIB:,.0f}",
        )
    return table


def _settings_table(report: Report, workload: Workload) -> Table:
    headings = ("threads", "lanes", "batch\ntokens", "texts/s", "tokens/s", "spread", "times", "")
    in_flight = counted(report.num_in_flight, "text")
    title = f"Settings, {report.variant} on {report.device}, {in_flight} waiting or running"
    table = make_table(title, (), headings)
    for result in report.results:
        rates, median = result.tokens_per_s, result.median_tokens_per_s
        table.add_row(
            *(f"{value:,}" for value in asdict(result.setting).values()),
            f"{median / workload.mean_tokens:,.0f}",
            f"{median:,.0f}",
            f"{100 * (max(rates) - min(rates)) / median:.0f} %" if len(rates) > 1 else "",
            f"{len(rates)}",
            "<- best" if result is report.best else "",
        )
    table.caption_justify = "left"
    table.caption = "tokens/s: median of all times; settings over 20 % slower than the best were not repeated"
    return table


def _show_command(console: Console, command: ServeCommand) -> None:
    if command.recommendation is not None:
        summary = _summarize(command.recommendation, is_tuned=command.is_tuned)
        console.print(f"\n{summary}")
    console.print()
    if command.check is not None:
        console.print(f"    {command.check}  # once: the bundle lacks a check of this engine", soft_wrap=True)
    console.print(f"    {command.command}", soft_wrap=True)


def _summarize(recommendation: Recommendation, *, is_tuned: bool) -> str:
    accuracy = recommendation.result.accuracy
    parts = [str(recommendation.result.variant)]
    if recommendation.tier is not EXACT:
        parts.append(f"{recommendation.relative_speed:.2f} times as fast")
        parts.append(f"mean cosine {accuracy.mean_cosine:.5f}")
        parts.append(f"smallest {accuracy.smallest_cosine:.5f}")
    if not is_tuned:
        parts.append("default settings")
    return f"{recommendation.tier.name if recommendation.tier else 'as asked'}: {', '.join(parts)}"
