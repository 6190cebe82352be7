"""`attnlens health`: report whether a server is ready as an exit code."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING

import click

from attnlens_cli.frame.failures import FAILURE
from attnlens_cli.frame.options import Command, option
from attnlens_cli.frame.server import ServerOptions, connection_options
from attnlens_cli.printable import printable_json

if TYPE_CHECKING:
    from attnlens_client.health import HealthStatus

_MAX_WAIT_S = 86_400  # a day
_DESCRIPTIONS = {
    "serving": "is serving",
    "not_serving": "is not serving",
    "unknown": "reports an unknown status",
    "service_unknown": "has no service",
}


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens health --address localhost:50051
  attnlens health --wait 60 && attnlens embed texts.txt -o vectors.npy
  attnlens health --json | jq -r .status""",
)
@option("--attention", is_flag=True, help="Check whether the server provides attention weights.")
@option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=click.FloatRange(0, _MAX_WAIT_S),
    default=0.0,
    help="Retry until the server is ready, for up to this duration.  [default: check once]",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object, even if no server answers.")
@connection_options(timeout_s=5.0)
def health(attention: bool, wait_s: float, as_json: bool, server: ServerOptions) -> None:
    """Report whether a server is ready.

    The exit code is 0 if it is serving, and 1 if it is not or does not answer. Uses gRPC's health protocol
    without running the model, so it is suitable for container probes.
    """
    from attnlens_client.connection import SERVICE
    from attnlens_client.health import ATTENTIONS, check_health

    service = ATTENTIONS if attention else SERVICE
    settings = server.client_settings()
    content = {"address": server.address, "service": service}
    try:
        with server.failures_explained():
            status = check_health(server.address, service=service, wait_s=wait_s, **settings)
    except click.ClickException as error:
        if not as_json:
            raise
        click.echo(printable_json(content | {"status": "unreachable", "message": error.message}))
        raise click.exceptions.Exit(error.exit_code) from error
    click.echo(
        printable_json(content | {"status": status}) if as_json else _line(status, server.address, service)
    )
    if status != "serving":
        raise click.exceptions.Exit(FAILURE)


def _line(status: "HealthStatus", address: str, service: str) -> str:
    name = f" {service}" if status == "service_unknown" else ""
    return f"{address} {_DESCRIPTIONS[status]}{name}"
