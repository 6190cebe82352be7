"""`attnlens bench DIR`: which engine, precision and settings of `attnlens serve` suit this machine."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import json
import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.config_option import ENGINES, PRECISIONS, PROVIDERS, ConfigFailure, config_option
from attnlens_cli.files.text_lines import read_lines
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.show.progress import shown_stages
from attnlens_server.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from attnlens_server.bundle import Bundle
    from attnlens_server.tuning import Workload

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
@_configure("engine", "The engine whose settings to search.", ENGINES)
@_configure("precision", "What it computes embeddings in.", PRECISIONS)
@_configure("provider", "Where ONNX Runtime runs.", PROVIDERS)
@_configure("device_id", "Which GPU, for CUDA.")
@_configure("device", "Where OpenVINO runs.")
@_measure(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Measure with these: one text a line, or JSON lines where FILE ends in .jsonl.  "
    "[default: random token ids, many short texts and a few long ones]",
)
@_measure(
    "--compare/--no-compare",
    default=True,
    show_default=True,
    help="First compare every engine that is installed in every precision, by speed and accuracy.",
)
@_measure(
    "--attention",
    is_flag=True,
    help="Measure requests for attention, of every layer and head. Engines are not compared.",
)
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
    compare: bool,
    attention: bool,
    threads: tuple[int, ...] | None,
    seconds: float,
    rates: tuple[float, ...] | None,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - each is a field of ServerConfig
) -> None:
    """Find the engine, precision and settings of `attnlens serve` for the bundle in DIR on this machine.

    Compares the engines that are installed, with default settings: their speed, and how far their embeddings
    agree with those of ONNX Runtime in fp32. Then searches settings for one of them, --engine in --precision:
    times its graph alone for batches of different shapes, then the engine with different --threads, --lanes
    and --max-batch-tokens, and then the latency of the best setting at several loads. All without gRPC and
    tokenization. Leave the machine alone while it runs.
    """
    import onnxruntime  # noqa: F401 - the engine that all are compared with
    from loky import cpu_count

    from attnlens_cli.show.bench.as_json import report_json
    from attnlens_cli.show.bench.commands import serve_commands, tuned_command
    from attnlens_cli.show.bench.tables import show_report
    from attnlens_server.bundle import open_bundle
    from attnlens_server.errors import StartupError
    from attnlens_server.tuning import BenchOptions, run_bench

    try:
        config = ServerConfig(bundle=bundle, threads=max(threads or (0,)), **options)
        opened = open_bundle(bundle, config.precision)
        workload = _workload(opened, texts)
        bench_options = BenchOptions(
            attention=attention,
            seconds=seconds,
            thread_counts=threads or (cpu_count(only_physical_cores=True), cpu_count()),
            rates=rates or (),
            sample=_sample(opened, workload) if compare and not attention else None,
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
        raise ConfigFailure(error) from error
    except StartupError as error:
        raise click.ClickException(str(error)) from error
    commands = serve_commands(config, report)
    if as_json:
        about = {"model": opened.model.name, "engine": config.engine, "precision": config.precision}
        content = about | {"attention": attention} | report_json(report, workload, commands)
        content |= {"command": tuned_command(config, report)}
        click.echo(json.dumps(content, ensure_ascii=False, indent=2).encode())
    else:
        show_report(report, workload, opened.model.name, commands)


def _workload(bundle: "Bundle", texts: Path | None) -> "Workload":
    from attnlens_server.tuning import draw_workload, read_workload

    if texts is None:
        return draw_workload(bundle.model)
    with texts.open("rb") as file:
        lines = read_lines(file, os.fspath(texts), is_jsonl=texts.name.lower().endswith(".jsonl"))
        return read_workload(bundle, (_single(line.text) for line in lines), os.fspath(texts))


def _sample(bundle: "Bundle", workload: "Workload") -> "Workload":
    """Return the texts to compare embeddings of: those given, else real ones if the bundle has any."""
    from attnlens_server.tuning import read_shipped_workload

    shipped = None if workload.are_real else read_shipped_workload(bundle)
    return (shipped or workload).sample()


def _single(text: str | tuple[str, str]) -> str:
    if isinstance(text, tuple):
        raise click.BadParameter("there are pairs of texts, give single ones", param_hint="'--texts'")
    return text
