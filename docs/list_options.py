"""Write options.md, the options of every command: `make docs`. A test compares them.

python docs/list_options.py
"""

from collections.abc import Iterator
from pathlib import Path

import click

from attnlens_cli.app import COMMANDS, SECTIONS, attnlens
from attnlens_cli.frame.options import Option, variable_part

PAGE = Path(__file__).parent / "options.md"
HEAD = """# Options

Look up an option, or the environment variable that sets it. `attnlens COMMAND --help` shows the same texts.

In a configuration file, the key is the option without the dashes, in the table of the command.
[Settings](settings.md) explains which source takes precedence.

`make docs` generates this page.
"""


def page() -> str:
    """Return the page."""
    context = click.Context(attnlens, info_name="attnlens", auto_envvar_prefix="ATTNLENS")
    lines = [HEAD, "## Global options", "", "Before the command: `attnlens --log-level debug serve ...`.", ""]
    lines += _table(attnlens, context)
    for section, commands in SECTIONS.items():
        lines += ["", f"## {section}"]
        for name in commands:
            command = attnlens.get_command(context, name)
            assert command is not None
            prefix = f"ATTNLENS_{variable_part(name)}"
            inner = click.Context(command, info_name=name, parent=context, auto_envvar_prefix=prefix)
            lines += ["", f"### {name}", "", COMMANDS[name][1]]
            if table := list(_table(command, inner)):
                lines += ["", *table]
    return "\n".join(lines) + "\n"


def _table(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the rows of a table with the options in `--help`."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    if options:
        yield "| option | variable | meaning |"
        yield "|---|---|---|"
    for option in options:
        record = option.get_help_record(context)
        if record is not None:
            variables = option.variables(context) if isinstance(option, Option) else ()
            names = ", ".join(f"`{name}`" for name in variables)
            # An escaped bar in code is shown with its backslash by some programs.
            row = [f"`{record[0].replace('|', '/')}`", names, " ".join(record[1].split()).replace("|", "\\|")]
            yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
