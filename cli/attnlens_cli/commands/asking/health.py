"""`attnlens health`: whether a server serves, as an exit code."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING

import click

from attnlens_cli.frame.failures import FAILURE
from attnlens_cli.frame.sections import SectionCommand
from attnlens_cli.frame.server_options import ServerOptions, connection_options
from attnlens_cli.show.printable import printable_json

if TYPE_CHECKING:
    from attnlens_client.drivers.health import HealthStatus

_MAX_WAIT_S = 86_400  # a day
_WORDS = {
    "serving": "is serving",
    "not_serving": "is not serving",
    "unknown": "does not know whether it is serving",
    "service_unknown": "has no service",
}


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens health --address localhost:50051
  attnlens health --wait 60 && attnlens embed texts.txt -o vectors.npy
  attnlens health --json | jq -r .status""",
)
@click.option("--attention", is_flag=True, help="Ask about attention weights, which a server may lack.")
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=click.FloatRange(0, _MAX_WAIT_S),
    default=0.0,
    help="Ask again until the server serves, for so long at most.  [default: ask once]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, also where no server answers.")
@connection_options(timeout_s=5.0)
def health(attention: bool, wait_s: float, as_json: bool, server: ServerOptions) -> None:
    """Tell whether a server serves: the exit code is 0 if it does.

    The code is 1 if it does not, or nothing answers. The question is that of gRPC's health protocol and needs
    no model, so it suits the probes of containers.
    """
    from attnlens_client.connection import SERVICE
    from attnlens_client.drivers.health import ATTENTIONS, check_health

    service = ATTENTIONS if attention else SERVICE
    settings = server.client_settings()
    told = {"address": server.address, "service": service}
    try:
        with server.failures_explained():
            status = check_health(server.address, service=service, wait_s=wait_s, **settings)
    except click.ClickException as error:
        if not as_json:
            raise
        click.echo(printable_json(told | {"status": "unreachable", "message": error.message}))
        raise click.exceptions.Exit(error.exit_code) from error
    click.echo(
        printable_json(told | {"status": status}) if as_json else _line(status, server.address, service)
    )
    if status != "serving":
        raise click.exceptions.Exit(FAILURE)


def _line(status: "HealthStatus", address: str, service: str) -> str:
    words = _WORDS[status] + (f" {service}" if status == "service_unknown" else "")
    return f"{address} {words}"
