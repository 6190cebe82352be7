"""`attnlens info`: what a server says about its model."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import dataclasses
import itertools
from typing import TYPE_CHECKING

import click

from attnlens_cli.frame.server_options import ServerOptions, server_options
from attnlens_cli.show.printable import printable, printable_json

if TYPE_CHECKING:
    from rich.table import Table

    from attnlens_client import ModelInfo, Parity


@click.command(
    epilog="""\b
Example:
  attnlens info --address localhost:50051
  attnlens info --json | jq .limits"""
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
def info(as_json: bool, server: ServerOptions) -> None:
    """Show a served model: sizes, limits, execution providers, parity figures and versions."""
    from attnlens_client import Client

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
    if as_json:
        click.echo(printable_json(dataclasses.asdict(model), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(_model_table(model, server.address))
    if model.parity.figures:
        console.print(_parity_table(model.parity))


def _model_table(model: "ModelInfo", address: str) -> "Table":
    from rich import box
    from rich.table import Table

    limits = model.limits
    versions = sorted(model.versions.items(), key=lambda entry: (entry[0].startswith("export/"), entry[0]))
    rows = {
        "model": model.name,
        "source": model.source,
        "licence of the weights": model.weights_license or "not stated",
        "family": f"{model.family}, {'causal' if model.is_causal else 'bidirectional'}",
        "layers x heads": f"{model.num_layers} x {model.num_heads}",
        "hidden size": f"{model.hidden_size:,} (feed-forward {model.intermediate_size:,})",
        "vocabulary": f"{model.vocab_size:,}",
        "longest input": f"{model.max_tokens:,} tokens (of {model.max_position_embeddings:,} positions)",
        "embedding size": f"{model.embedding_size:,}",
        "embeddings": _embedding_line(model),
        "prompts": _prompts_line(model),
        "execution providers": ", ".join(model.execution_providers),
        "precision": "fp32" if model.precision == "fp32" else f"{model.precision}, attention in fp32",
        "texts in a request": f"{limits.max_inputs_per_request:,}",
        "bytes in a text": f"{limits.max_text_bytes:,}",
        "bytes of text in a request": f"{limits.max_request_text_bytes:,}",
        "bytes in a request": f"{limits.max_request_bytes:,}",
        "bytes in a response": f"{limits.max_message_bytes:,}",
        "texts in the queue": f"{limits.max_queue:,}",
        "tokens in a batch": f"{limits.max_batch_tokens:,}",
        "parity with PyTorch": _parity_line(model.parity),
        "versions": "\n".join(f"{name} {version}" for name, version in versions),
    }
    table = Table(title=address, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, "\n".join(map(printable, value.split("\n"))))
    return table


def _embedding_line(model: "ModelInfo") -> str:
    steps = [
        f"{model.pooling} over the tokens" + (", those of a prompt left out" if model.exclude_prompt else "")
    ]
    for layer in model.dense:
        steps += ["length 1"] if layer.normalize_input else []
        bias = "" if layer.bias else ", no bias"
        steps.append(f"dense {layer.in_features} -> {layer.out_features} ({layer.activation}{bias})")
    steps += ["length 1"] if model.normalize else ["not normalized"]
    return "; ".join(steps)


def _prompts_line(model: "ModelInfo") -> str:
    return (
        "\n".join(
            f"{name}: {text!r}" + (" (default)" if name == model.default_prompt_name else "")
            for name, text in sorted(model.prompts.items())
        )
        or "none"
    )


def _parity_line(parity: "Parity") -> str:
    verdict = "passed" if parity.passed else "FAILED"
    return f"{verdict}, {parity.num_cases} input shapes, tolerance {parity.tolerance:.0e}"


def _parity_table(parity: "Parity") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title="largest errors", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("graph and output", overflow="fold")
    for name, width in (("ONNX\n-torch", 7), ("ONNX\n-f64", 7), ("torch\n-f64", 7), ("min.\ncosine", 11)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for graph, figures in itertools.groupby(parity.figures, key=lambda figure: figure.graph):
        table.add_row(printable(graph.removeprefix("onnx/")))
        for figure in figures:
            table.add_row(
                f"  {printable(figure.output)}",
                f"{figure.max_abs_error:.1e}",
                f"{figure.max_abs_error_float64:.1e}",
                f"{figure.torch_abs_error_float64:.1e}",
                f"{figure.min_cosine:.9f}",
            )
    return table
