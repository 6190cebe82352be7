"""The TOML file of `--config-file`: option values for each command, checked name by name."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from attnlens_cli.frame.failures import nearest


def read(path: Path, group: click.Command, commands: Iterable[str]) -> dict[str, Any]:
    """Read `path` as a click default map: global options at the top, then a table for each command.

    Raises:
        click.UsageError: the file is not TOML, or names an unknown table or global option. The keys
            of a table are checked by `known_options` when its command is run.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} is not valid TOML: {error}") from error
    names = list(commands)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for name in tables:
        if name not in names:
            raise click.UsageError(f"{path}: no such command [{name}]{nearest(name, names)}")
    rest = {key: value for key, value in content.items() if key not in tables}
    return {**known_options(group, rest, str(path)), **tables}


def known_options(command: click.Command, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values` with click's parameter names as keys; `max-tokens` and `max_tokens` are the same.

    Raises:
        click.UsageError: `values` is not a table, or a key is not an option of `command`.
    """
    if not isinstance(values, Mapping):
        raise click.UsageError(f"{where} in the configuration file must be a table of options")
    options = _options(command)
    unknown = next((key for key in values if key.replace("-", "_") not in options), None)
    if unknown is not None:
        shown = [name.replace("_", "-") for name in options]
        suggestion = nearest(unknown.replace("_", "-"), shown)
        raise click.UsageError(f"no such option {unknown} in {where} of the configuration file{suggestion}")
    chosen = {key: options[key.replace("-", "_")] for key in values}
    for key, value in values.items():
        if isinstance(value, bool) and not chosen[key].is_flag:
            raise click.UsageError(
                f"{key} is {str(value).lower()} in {where} of the configuration file: it takes a value"
            )
    return {str(chosen[key].name): value for key, value in values.items()}


def _options(command: click.Command) -> dict[str, click.Option]:
    """Map each way to write an option, with underscores, to the option."""
    return {
        spelling.lstrip("-").replace("-", "_"): option
        for option in command.params
        if isinstance(option, click.Option) and option.name and option.expose_value
        for spelling in (option.name, *(opt for opt in option.opts if opt.startswith("--")))
    }
