"""Options for the fields of `ServerConfig`, which defines their defaults."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from attnlens_cli.frame.options import in_section
from attnlens_server.config import ConfigError, EngineName, GraphPrecision, Precision, Provider, ServerConfig

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FIELDS = {field.name for field in dataclasses.fields(ServerConfig)} - {"bundle"}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
ENGINES = click.Choice(get_args(EngineName))
PROVIDERS = click.Choice(get_args(Provider))
PRECISIONS = click.Choice(get_args(Precision))
GRAPH_PRECISIONS = click.Choice(get_args(GraphPrecision))


class ConfigFailure(click.BadParameter):
    """An invalid field of `ServerConfig`, reported by its option."""

    def __init__(self, error: ConfigError) -> None:
        ctx = click.get_current_context()
        first, _, rest = str(error).partition(" ")
        option = next((option for option in ctx.command.params if option.name == first), None)
        # Elsewhere in the message, a name without an underscore could be an ordinary word.
        rest = re.sub(r"\w+_\w+", lambda match: _flag(match[0]), rest)
        super().__init__(f"{_flag(first)} {rest}", ctx, option)

    def format_message(self) -> str:
        """Return the message unchanged, because it contains the option."""
        return self.message


def _flag(word: str) -> str:
    return f"--{word.replace('_', '-')}" if word in _FIELDS else word


def config_option(
    name: str,
    help: str,  # noqa: A002 - click's name for it
    type: click.ParamType[Any] | type[int] | type[float] | None = None,  # noqa: A002 - click's name for it
    *,
    section: str,
) -> Callable[[_Command], _Command]:
    """Return the option for the field `name` of `ServerConfig`, with its default.

    A boolean field becomes a flag, or `--NAME/--no-NAME` if its default is True.
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
