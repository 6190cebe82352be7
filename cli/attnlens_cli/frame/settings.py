"""Option values from the configuration file, and warnings about unknown environment variables."""

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from attnlens_cli.frame.failures import nearest
from attnlens_cli.frame.options import SHARED_VARIABLES, Option, variable_part
from attnlens_cli.printable import printable

_PREFIX = "ATTNLENS_"
# Variables that Kubernetes and Docker set for a service or container named attnlens.
_SERVICE_NAME = re.compile(r"ATTNLENS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")  # the value of ATTNLENS_PORT


def read_config_file(path: Path, group: click.Command, commands: Collection[str]) -> dict[str, Any]:
    """Read `path` as a click default map: global options, then a table per command.

    Raises:
        click.UsageError: The file is not TOML, or contains an unknown table or global option. The keys of a
            table are validated by `known_options` when its command runs.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path} is not valid TOML: {error}") from error
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for name in tables:
        if name not in commands:
            raise click.UsageError(f"{path}: no such command [{name}]{nearest(name, commands)}")
    rest = {key: value for key, value in content.items() if key not in tables}
    return {**known_options(group, rest, str(path)), **tables}


def known_options(command: click.Command, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values` keyed by click parameter name.

    Keys of `values` are option names, with hyphens or underscores.

    Raises:
        click.UsageError: `values` is not a table, or a key is not an option of `command`.
    """
    if not isinstance(values, Mapping):
        raise click.UsageError(f"{where} in the configuration file must be a table of options")
    options = {
        name.removeprefix("--"): option
        for option in _options(command)
        if option.expose_value
        for name in option.opts
        if name.startswith("--")
    }
    selected: dict[str, Any] = {}
    for key, value in values.items():
        option = options.get(key.replace("_", "-"))
        if option is None:
            suggestion = nearest(key.replace("_", "-"), options)
            raise click.UsageError(f"no such option {key} in {where} of the configuration file{suggestion}")
        if isinstance(value, bool) and not option.is_flag:
            raise click.UsageError(
                f"{key} in {where} of the configuration file requires a value, not {str(value).lower()}"
            )
        selected[str(option.name)] = value
    return selected


def warn_of_unknown_variables(ctx: click.Context, name: str, command: click.Command) -> None:
    """Print a warning on stderr about variables `ATTNLENS_*` that no option reads.

    Variables of other commands are not checked, because that would import their modules.

    Args:
        ctx: The context of the root command.
        name: Name of the command to run.
        command: The command itself.
    """
    variables = [
        key
        for key, value in os.environ.items()
        if key.startswith(_PREFIX) and not _SERVICE_URL.fullmatch(value) and not _SERVICE_NAME.fullmatch(key)
    ]
    if not variables:
        return
    own, root = f"{_PREFIX}{variable_part(name)}", ctx.command
    inner = click.Context(command, info_name=name, auto_envvar_prefix=own)
    known = {*SHARED_VARIABLES, f"{_PREFIX}HELP", f"{own}_HELP"}
    known |= {variable for option in _options(root) for variable in option.variables(ctx)}
    known |= {variable for option in _options(command) for variable in option.variables(inner)}
    assert isinstance(root, click.Group)  # noqa: S101 - for the type checker
    others = tuple(f"{_PREFIX}{variable_part(other)}_" for other in root.list_commands(ctx) if other != name)
    unknown = sorted(key for key in variables if key not in known and not key.startswith(others))
    if not unknown:
        return
    names = ", ".join(f"{printable(key)}{_suggestion(key, known)}" for key in unknown)
    with suppress(OSError):  # stderr may be closed; the command runs anyway
        click.echo(f"warning: unknown environment variable{'s' * (len(unknown) > 1)} {names}", err=True)


def _options(command: click.Command) -> Iterable[Option]:
    return (option for option in command.params if isinstance(option, Option))


def _suggestion(key: str, known: Collection[str]) -> str:
    # Compare without the prefix, which would make all names similar.
    ends = [name.removeprefix(_PREFIX) for name in known]
    return nearest(key.removeprefix(_PREFIX), ends).replace("did you mean ", f"did you mean {_PREFIX}")
