"""Options that are fields of the server's configuration, which states their defaults."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from attnlens_cli.frame.sections import in_section
from attnlens_server.config import EngineName, GraphPrecision, Precision, Provider, ServerConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
ENGINES = click.Choice(get_args(EngineName))
PROVIDERS = click.Choice(get_args(Provider))
PRECISIONS = click.Choice(get_args(Precision))
GRAPH_PRECISIONS = click.Choice(get_args(GraphPrecision))


def config_option(
    name: str,
    help: str,  # noqa: A002 - click's name for it
    type: click.ParamType[Any] | type[int] | None = None,  # noqa: A002 - click's name for it
    *,
    section: str,
) -> Callable[[_Command], _Command]:
    """Return the option for the field `name` of ServerConfig, with the default that the field has.

    A field that is false by default becomes a flag, one that is true a pair: `--NAME/--no-NAME`.
    """
    default, option = _DEFAULTS[name], name.replace("_", "-")
    return in_section(section)(
        f"--{option}/--no-{option}" if default is True else f"--{option}",
        type=type,
        default=default,
        show_default=True,
        is_flag=isinstance(default, bool),
        help=help,
    )
