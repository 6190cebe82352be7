"""`attnlens bench`: recommend the engine, precision and settings of `attnlens serve`."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.config_option import ENGINES, PRECISIONS, PROVIDERS, ConfigFailure, config_option
from attnlens_cli.commands.options import cache_option, measurements_json_option
from attnlens_cli.files.text_lines import read_lines
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.show.progress import shown_stages
from attnlens_server.config import ConfigError, ServerConfig

if TYPE_CHECKING:
    from attnlens_server.bundle import Bundle
    from attnlens_server.tuning import Report, Workload

EPILOG = """\b
Example:
  attnlens bench bundles/minilm
  attnlens bench bundles/minilm --texts sentences.txt
  attnlens bench bundles/minilm --json | jq -r .command"""

_MAX_THREADS = 1024


class _ThreadCounts(click.ParamType[tuple[int, ...]]):
    """Positive integers up to _MAX_THREADS, separated by commas."""

    name = "numbers"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as in click
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        for part in parts:
            if not (re.fullmatch("[0-9]{1,4}", part) and 1 <= int(part) <= _MAX_THREADS):
                expected = f"a whole number from 1 to {_MAX_THREADS} (separate several by commas)"
                self.fail(f"{part!r} is not {expected}", param, ctx)
        return tuple(int(part) for part in parts)


_measure, _compute = in_section("Measurement"), in_section("Compute")
_configure = partial(config_option, section="Compute")


@click.command(cls=Command, epilog=EPILOG)
@click.argument("bundle", metavar="DIR", type=click.Path(path_type=Path))
@_configure("engine", "Engine whose settings to search.", ENGINES)
@_configure("precision", "Precision of its embeddings.", PRECISIONS)
@_configure("provider", "Device of ONNX Runtime.", PROVIDERS)
@_configure("device_id", "Index of the GPU, for CUDA.")
@_configure("device", "Device of OpenVINO.")
@_measure(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Texts to measure with, one per line, or JSON lines if FILE ends in .jsonl.  "
    "[default: random token ids, many short texts and a few long ones]",
)
@_measure(
    "--compare/--no-compare",
    default=True,
    show_default=True,
    help="First compare all installed engines in all precisions, by speed and accuracy.",
)
@_measure(
    "--attention",
    is_flag=True,
    help="Measure requests for the attention of all layers and heads. Engines are not compared.",
)
@_compute(
    "--threads",
    type=_ThreadCounts(),
    metavar="N,...",
    help="Numbers of threads to try.  [default: one per physical core; one per logical core]",
)
@_measure(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=1.0,
    show_default=True,
    help="Duration of each measurement. Each setting is measured up to three times.",
)
@cache_option
@measurements_json_option
def bench(
    bundle: Path,
    cache_dir: Path | None,
    texts: Path | None,
    compare: bool,
    attention: bool,
    threads: tuple[int, ...] | None,
    seconds: float,
    as_json: bool,
    **options: Any,  # noqa: ANN401 - fields of ServerConfig
) -> None:
    """Find the engine, precision and settings of `attnlens serve` for the bundle in DIR on this machine.

    Compares all installed engines with default settings by speed and by the accuracy of their embeddings
    relative to ONNX Runtime in fp32. Then measures --engine in --precision with different --threads, --lanes
    and --max-batch-tokens, and prints the commands to copy. Measures the engine, without gRPC and
    tokenization. Run nothing else on the machine at the same time.

    `attnlens serve --auto` applies the result, which is stored in the cache, unless --attention is given.
    """
    import onnxruntime  # noqa: F401 - the reference for all engines

    from attnlens_cli.show.bench import report_json, serve_commands, show_report
    from attnlens_server.bundle import open_bundle
    from attnlens_server.engine.cpus import count_cpus
    from attnlens_server.errors import StartupError
    from attnlens_server.tuning import BenchOptions, run_bench

    try:
        config = ServerConfig(bundle=bundle, threads=max(threads or (0,)), **options)
        opened = open_bundle(bundle, config.precision)
        workload = _workload(opened, texts)
        bench_options = BenchOptions(
            attention=attention,
            seconds=seconds,
            thread_counts=threads or (count_cpus(only_physical_cores=True), count_cpus()),
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
    if not attention:
        _save(config, cache_dir, report)
    if as_json:
        head = {"model": opened.model.name, "attention": attention}
        content = head | report_json(config, report, workload)
        click.echo(json.dumps(content, ensure_ascii=False, indent=2).encode())
    else:
        show_report(report, workload, opened.model.name, serve_commands(config, report))


def _save(config: ServerConfig, cache_dir: Path | None, report: "Report") -> None:
    """Store the result for `serve --auto`. If that fails, it is only printed."""
    from attnlens_cli.sources.cache import default_directory
    from attnlens_cli.sources.measured import save_report

    try:
        save_report(config, cache_dir or default_directory(), report)
    except OSError as error:
        click.echo(f"the result was not stored for `attnlens serve --auto`: {error}", err=True)


def _workload(bundle: "Bundle", texts: Path | None) -> "Workload":
    from attnlens_server.tuning import draw_workload, read_workload

    if texts is None:
        return draw_workload(bundle.model)
    with texts.open("rb") as file:
        lines = read_lines(file, os.fspath(texts), is_jsonl=texts.name.lower().endswith(".jsonl"))
        return read_workload(bundle, (_single(line.text) for line in lines), os.fspath(texts))


def _sample(bundle: "Bundle", workload: "Workload") -> "Workload":
    """Return the texts for the accuracy. Real texts shipped with the bundle replace random ids."""
    from attnlens_server.tuning import read_shipped_workload

    shipped = None if workload.are_real else read_shipped_workload(bundle)
    return (shipped or workload).sample()


def _single(text: str | tuple[str, str]) -> str:
    if isinstance(text, tuple):
        raise click.BadParameter("pairs of texts are not supported: use single texts", param_hint="'--texts'")
    return text
