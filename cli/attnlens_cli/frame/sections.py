"""Options in sections: `--help` lists those that belong together under one title."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FIRST = "Options"
_MIN_NAMES = 18  # columns; an option with a longer name has its help on the next line


class SectionOption(click.Option):
    """An option that `--help` lists under the title `section`."""

    def __init__(self, *args: Any, section: str, **settings: Any) -> None:  # noqa: ANN401 - click's own
        super().__init__(*args, **settings)
        self.section = section


class SingleOption(SectionOption):
    """A SectionOption that may be given once: click would take the last value silently."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:  # noqa: ANN401 - private in click
        """Let the parser collect all values."""
        del ctx
        parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:  # noqa: ANN401 - click's own
        """Return the value and its source.

        Raises:
            click.UsageError: there are several values.
        """
        name = str(self.name)
        if name not in opts:
            return super().consume_value(ctx, opts)
        if len(opts[name]) > 1:
            raise click.UsageError(f"{self.opts[0]} is given {len(opts[name])} times: give it once", ctx)
        return super().consume_value(ctx, {**opts, name: opts[name][0]})


class SectionCommand(click.Command):
    """A command whose `--help` has a list of options for each section, in the order of their first option.

    Options of no section come first, under "Options"; `--help` is the last of these, and alone comes last.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists."""
        write_options(self, ctx, formatter)


def write_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write a list of the command's options for each section."""
    records: dict[str, list[tuple[str, str]]] = {_FIRST: []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None and record[1]:  # an argument without help stands in the usage line
            records.setdefault(getattr(parameter, "section", _FIRST), []).append(record)
    if len(records[_FIRST]) == 1:
        records[_FIRST] = records.pop(_FIRST)
    most = max(_MIN_NAMES, formatter.width // 3)
    for title, lines in records.items():
        widest = max((len(name) for name, _ in lines if len(name) <= most), default=most)
        with formatter.section(title):
            formatter.write_dl(lines, col_max=widest)


def in_section(title: str) -> Callable[..., Callable[[_Command], _Command]]:
    """Return `click.option` for options of the section `title`."""
    return partial(click.option, cls=SectionOption, section=title)
