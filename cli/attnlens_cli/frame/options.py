"""Base classes of commands and options: environment variables, and sections in `--help`."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import click

from attnlens_cli.printable import is_utf8

_Command = TypeVar("_Command", bound=Callable[..., Any])

DEFAULT_SECTION = "Options"
SHARED_VARIABLES = frozenset(
    {
        "ATTNLENS_ADDRESS",
        "ATTNLENS_API_KEY",
        "ATTNLENS_CACHE_DIR",
        "ATTNLENS_MODEL",
        "ATTNLENS_TIMEOUT_S",
        "ATTNLENS_TLS",
        "ATTNLENS_TLS_CA",
        "ATTNLENS_TLS_CERT",
        "ATTNLENS_TLS_KEY",
        "ATTNLENS_TLS_SERVER_NAME",
    }
)
"""Variables of options with `is_shared`. A test compares them with the options."""
_MIN_NAME_COLUMNS = 18  # the help text of an option with a longer name starts on the next line


def variable_part(name: str) -> str:
    """Return a command or option name as part of an environment variable: `MAX_TOKENS` for `--max-tokens`."""
    return name.lstrip("-").replace("-", "_").upper()


class Option(click.Option):
    """An option with a section in `--help` and the environment variable `ATTNLENS_<COMMAND>_<OPTION>`.

    click derives the variable from the name of the Python parameter, which may differ from the option.

    Args:
        section: Title in `--help`.
        is_shared: Whether the option also has the variable `ATTNLENS_<OPTION>`, which applies to all
            commands with this option. The variable of the command takes precedence.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - as in click
        section: str = DEFAULT_SECTION,
        is_shared: bool = False,
        **settings: Any,  # noqa: ANN401 - as in click
    ) -> None:
        super().__init__(*args, **settings)
        self.section, self.is_shared = section, is_shared

    @property
    def long_name(self) -> str:
        """The first name with two dashes, such as `--cost` for `--cost/--no-cost`."""
        return next(name for name in self.opts if name.startswith("--"))

    def variables(self, ctx: click.Context) -> Iterator[str]:
        """Yield the environment variables in order of precedence."""
        option = variable_part(self.long_name)
        if ctx.auto_envvar_prefix is not None and self.allow_from_autoenv:
            yield f"{ctx.auto_envvar_prefix}_{option}"
        if self.is_shared:
            yield f"ATTNLENS_{option}"

    def variable_set(self, ctx: click.Context) -> str | None:
        """Return the variable that provides the value, or None. An empty variable counts as unset."""
        return next((name for name in self.variables(ctx) if os.environ.get(name)), None)

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value from the environment, or None."""
        name = self.variable_set(ctx)
        return None if name is None else os.environ[name]


class _CollectingOption(Option):
    """An option whose values on the command line are all collected. click would silently use the last one."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:  # noqa: ANN401 - private in click
        """Let the parser collect all values."""
        del ctx
        parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as in click
        """Return the value and its source."""
        name = str(self.name)
        if name not in opts:
            return super().consume_value(ctx, opts)
        return super().consume_value(ctx, {**opts, name: self.single_value(ctx, opts[name])})

    def single_value(self, ctx: click.Context, values: list[Any]) -> Any:  # noqa: ANN401 - as in click
        """Return the value for those that were collected."""
        raise NotImplementedError


class SingleOption(_CollectingOption):
    """An option that is rejected if it is repeated."""

    def single_value(self, ctx: click.Context, values: list[Any]) -> Any:  # noqa: ANN401 - as in click
        """Return the value.

        Raises:
            click.UsageError: The option was repeated.
        """
        if len(values) > 1:
            raise click.UsageError(f"{self.opts[0]} is given {len(values)} times: use it once", ctx)
        return values[0]


class JoinedOption(_CollectingOption):
    """An option with a list of values, separated by commas or by repeating the option."""

    def single_value(self, ctx: click.Context, values: list[Any]) -> Any:  # noqa: ANN401 - as in click
        """Return all values, separated by commas."""
        del ctx
        return ",".join(values)


class Utf8Text(click.ParamType[str]):
    """Text that can be sent to a server. An argument with bytes that are not UTF-8 is rejected."""

    name = "text"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as in click
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        """Return the text unchanged."""
        if not is_utf8(str(value)):
            self.fail("it is not UTF-8", param, ctx)
        return str(value)


TEXT = Utf8Text()

option = partial(click.option, cls=Option)
"""`click.option` for the default section."""


def in_section(title: str) -> Callable[..., Callable[[_Command], _Command]]:
    """Return `click.option` for options of the section `title`."""
    return partial(click.option, cls=Option, section=title)


def stacked(*decorators: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return one decorator that applies several. `--help` lists their options in the given order."""

    def decorate(command: _Command) -> _Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


class Command(click.Command):
    """A command whose `--help` lists options by section.

    Sections are in the order of their first option. Options without a section come first.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        write_options(self, ctx, formatter)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command, one list per section."""
    records: dict[str, list[tuple[str, str]]] = {DEFAULT_SECTION: []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None and record[1]:  # arguments without help are in the usage line only
            records.setdefault(getattr(parameter, "section", DEFAULT_SECTION), []).append(record)
    if len(records[DEFAULT_SECTION]) == 1:  # --help alone
        records[DEFAULT_SECTION] = records.pop(DEFAULT_SECTION)
    limit = max(_MIN_NAME_COLUMNS, formatter.width // 3)
    for title, lines in records.items():
        widest = max((len(name) for name, _ in lines if len(name) <= limit), default=limit)
        with formatter.section(title):
            formatter.write_dl(lines, col_max=widest)
