"""Write options.md, the options of every command: `make docs`. A test compares them.

python docs/list_options.py
"""

from collections.abc import Iterator
from pathlib import Path

import click

from attnlens_cli.app import COMMANDS, SECTIONS, attnlens

PAGE = Path(__file__).parent / "options.md"
HEAD = """# Options

Every option of every command, with the environment variable that sets it. In a file given by `--config-file`
its key is the option without the dashes, in the table of the command. [settings.md](settings.md) says which
wins. `make docs` writes this page; `attnlens COMMAND --help` shows the same.
"""


def page() -> str:
    """Return the page."""
    context = click.Context(attnlens, info_name="attnlens", auto_envvar_prefix="ATTNLENS")
    lines = [HEAD, "## attnlens", "", "Before the command: `attnlens --log-level debug serve ...`.", ""]
    lines += _table(attnlens, context)
    for section, commands in SECTIONS.items():
        lines += ["", f"## {section}"]
        for name in commands:
            command = attnlens.get_command(context, name)
            assert command is not None
            inner = click.Context(
                command, info_name=name, parent=context, auto_envvar_prefix=_prefix("ATTNLENS", name)
            )
            lines += ["", f"### {name}", "", COMMANDS[name][1], "", *_table(command, inner)]
    return "\n".join(lines) + "\n"


def variables(option: click.Option, context: click.Context) -> Iterator[str]:
    """Yield the environment variables of an option, the one that wins first."""
    if option.name == "version":
        return
    yield from [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    if context.auto_envvar_prefix and option.name:
        yield _prefix(context.auto_envvar_prefix, option.name)
    if hasattr(option, "variable"):  # it has one for all commands, too
        yield option.variable(context)


def _prefix(prefix: str, name: str) -> str:
    return f"{prefix}_{name}".upper().replace("-", "_")


def _table(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield a table of what `--help` lists."""
    yield "| option | variable | meaning |"
    yield "|---|---|---|"
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if isinstance(option, click.Option) and record is not None:
            names = ", ".join(f"`{name}`" for name in dict.fromkeys(variables(option, context)))
            # An escaped bar in code is shown with its backslash by some programs.
            row = [f"`{record[0].replace('|', '/')}`", names, " ".join(record[1].split()).replace("|", "\\|")]
            yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
