"""`attnlens info`: show a served model."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import dataclasses

import click

from attnlens_cli.commands.options import json_option
from attnlens_cli.frame.options import Command
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.printable import printable_json


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens info --address localhost:50051
  attnlens info --json | jq .limits""",
)
@json_option
@server_options
def info(as_json: bool, server: ServerOptions) -> None:
    """Show a served model: state, sizes, limits, engine, parity and versions."""
    from attnlens_client import Client

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
    if as_json:
        content = dataclasses.asdict(model)
        names = {"model": content.pop("name"), "model_version": content.pop("version")}
        click.echo(printable_json(names | content, indent=2))
        return
    from attnlens_cli.show.console import make_console
    from attnlens_cli.show.model import figures_table, gates_table, model_table

    console = make_console()
    console.print(model_table(model, server.address))
    if model.parity.gates:
        console.print(gates_table(model.parity.gates))
    if model.engine_check is not None and model.engine_check.gates:
        console.print(gates_table(model.engine_check.gates, f"gates of {model.engine}"))
    if model.parity.figures:
        console.print(figures_table(model.parity.figures))
