"""`attnlens bench DIR`: which settings of `attnlens serve` suit this machine."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import dataclasses
import json
import math
import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.config_option import PRECISIONS, PROVIDERS, config_option
from attnlens_cli.files.text_lines import read_lines
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.show.progress import shown_stages
from attnlens_server.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from attnlens_server.bundle import Bundle
    from attnlens_server.tuning import Report, Workload

EPILOG = """\b
Example:
  attnlens bench bundles/minilm
  attnlens bench bundles/minilm --texts sentences.txt --rates 10,50
  attnlens bench bundles/minilm --json | jq -r .command"""

_MAX_RATE = 100_000.0
_MAX_THREADS = 1024


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers separated by commas, each above 0 and at most `most`."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float], most: float) -> None:
        self._kind = kind
        self._most = most

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        numbers = []
        for part in str(value).split(","):
            try:
                number = self._kind(part)
            except ValueError:
                number = self._kind(0)
            if not (math.isfinite(number) and 0 < number <= self._most):
                kind = "whole number" if self._kind is int else "number"
                self.fail(
                    f"{part.strip()!r} is not a {kind} above 0 and up to {self._most:g} "
                    "(separate several by commas)",
                    param,
                    ctx,
                )
            numbers.append(number)
        return tuple(numbers)


_measure = in_section("What to measure")
_compute = in_section("Computing")
_configure = partial(config_option, section="Computing")


@click.command(cls=SectionCommand, epilog=EPILOG)
@click.argument("bundle", metavar="DIR", type=click.Path(path_type=Path))
@_configure("provider", "Where to run.", PROVIDERS)
@_configure("precision", "Which of the bundle's graphs for embeddings.", PRECISIONS)
@_configure("device_id", "Which GPU.")
@_measure(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure with these: one text a line, or JSON lines where FILE ends in .jsonl.  "
    "[default: random token ids, many short texts and a few long ones]",
)
@_measure("--attention", is_flag=True, help="Measure requests for attention, of every layer and head.")
@_compute(
    "--threads",
    type=_Numbers(int, _MAX_THREADS),
    metavar="N,...",
    help="Numbers of threads to try.  [default: one a physical core; one a logical core]",
)
@_measure(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=1.0,
    show_default=True,
    help="How long to measure a setting, each of up to three times.",
)
@_measure(
    "--rates",
    type=_Numbers(float, _MAX_RATE),
    metavar="R,...",
    help="Texts a second at which to measure latency.  [default: 10, 50 and 80 % of the throughput]",
)
@click.option("--json", "as_json", is_flag=True, help="Print every measurement as JSON.")
def bench(
    bundle: Path,
    texts: Path | None,
    attention: bool,
    threads: tuple[int, ...] | None,
    seconds: float,
    rates: tuple[float, ...] | None,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - each is a field of ServerConfig
) -> None:
    """Find the settings of `attnlens serve` that suit the bundle in DIR on this machine.

    Times the graph alone for batches of different shapes, then the engine with different --threads, --lanes
    and --max-batch-tokens, and then the latency of the best setting at several loads. All in this process,
    without gRPC and tokenization. Leave the machine alone while it runs.
    """
    from loky import cpu_count

    from attnlens_server.bundle import open_bundle
    from attnlens_server.errors import StartupError
    from attnlens_server.tuning import BenchOptions, run_bench

    try:
        config = ServerConfig(bundle=bundle, **options)
        opened = open_bundle(bundle, config.precision)
        workload = _workload(opened, texts)
        bench_options = BenchOptions(
            attention=attention,
            seconds=seconds,
            thread_counts=threads or (cpu_count(only_physical_cores=True), cpu_count()),
            rates=rates or (),
        )
        with shown_stages() as progress:
            report = run_bench(
                opened,
                config,
                workload,
                bench_options,
                lambda stage, done, total: progress(stage, "", done, total),
            )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except StartupError as error:
        raise click.ClickException(str(error)) from error
    command = _serve_command(bundle, config, report)
    if as_json:
        content = _as_json(report, workload)
        about = {"model": opened.model.name, "precision": config.precision, "attention": attention}
        click.echo(json.dumps(about | content | {"command": command}, ensure_ascii=False, indent=2).encode())
    else:
        from attnlens_cli.show.bench_tables import show_report

        show_report(report, workload, opened.model.name, command)


def _workload(bundle: "Bundle", texts: Path | None) -> "Workload":
    from attnlens_server.tuning import draw_workload, read_workload

    if texts is None:
        return draw_workload(bundle.model)
    with texts.open("rb") as file:
        lines = read_lines(file, os.fspath(texts), is_jsonl=texts.name.lower().endswith(".jsonl"))
        return read_workload(bundle, (_single(line.text) for line in lines), os.fspath(texts))


def _single(text: str | tuple[str, str]) -> str:
    if isinstance(text, tuple):
        raise click.BadParameter("there are pairs of texts, give single ones", param_hint="'--texts'")
    return text


def _serve_command(bundle: Path, config: ServerConfig, report: "Report") -> str:
    """Return the command that starts a server with the best setting."""
    best = report.best.setting
    words = ["attnlens", "serve", os.fspath(bundle)]
    words += ["--provider", report.provider] if report.provider == "cuda" else []
    words += ["--device-id", str(config.device_id)] if config.device_id else []
    words += ["--precision", config.precision] if config.precision != "fp32" else []
    words += ["--threads", str(best.threads), "--lanes", str(best.lanes)]
    words += ["--max-batch-tokens", str(best.max_batch_tokens)]
    return shlex.join(words)


def _as_json(report: "Report", workload: "Workload") -> dict[str, Any]:
    """Return the measurements as JSON values."""
    return {
        "provider": report.provider,
        "texts": {
            "source": workload.description,
            "count": len(workload.input_ids),
            "cut": workload.num_cut,
            "mean_tokens": workload.mean_tokens,
            **{f"p{share}_tokens": workload.quantile_tokens(share / 100) for share in (50, 90, 99, 100)},
        },
        "in_flight": report.num_in_flight,
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
    }
