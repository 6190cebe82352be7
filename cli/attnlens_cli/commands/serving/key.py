"""`attnlens key`: create an API key for a client."""

import click

from attnlens_cli.frame.options import TEXT, Command


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens key search""",
)
@click.argument("name", type=TEXT)
def key(name: str) -> None:
    """Create an API key for the client NAME.

    Standard output is the line for the file of `attnlens serve --api-keys`, which contains only a hash of the
    key. The key itself appears once, on standard error. A client may have several keys.
    """
    from attnlens_server.access.keys import new_key  # noqa: PLC0415 - heavy

    try:
        secret, line = new_key(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'NAME'") from error
    click.echo(line)
    click.echo(f"The key of {name}, which is not stored anywhere:\n{secret}", err=True)
