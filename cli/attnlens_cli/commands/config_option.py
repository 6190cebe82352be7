"""Options that are fields of the server's configuration, which states their defaults."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from attnlens_cli.frame.sections import in_section
from attnlens_server.config import ConfigError, EngineName, GraphPrecision, Precision, Provider, ServerConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FIELDS = {field.name for field in dataclasses.fields(ServerConfig)} - {"bundle"}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
ENGINES = click.Choice(get_args(EngineName))
PROVIDERS = click.Choice(get_args(Provider))
PRECISIONS = click.Choice(get_args(Precision))
GRAPH_PRECISIONS = click.Choice(get_args(GraphPrecision))


class ConfigFailure(click.BadParameter):
    """An invalid value of a field of ServerConfig, named as its option."""

    def __init__(self, error: ConfigError) -> None:
        ctx = click.get_current_context()
        first, _, rest = str(error).partition(" ")
        option = next((each for each in ctx.command.params if each.name == first), None)
        # Elsewhere in a message, only names with an underscore are sure to be fields and not words.
        rest = re.sub(r"\w+_\w+", lambda found: _flag(found[0]), rest)
        super().__init__(f"{_flag(first)} {rest}", ctx, option)

    def format_message(self) -> str:
        """Return the message as it is: it names the option."""
        return self.message


def _flag(word: str) -> str:
    return f"--{word.replace('_', '-')}" if word in _FIELDS else word


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
