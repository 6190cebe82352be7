"""A warning for variables of the environment that look like ours and that no option reads."""

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress

import click

from attnlens_cli.frame.failures import nearest
from attnlens_cli.show.printable import printable

_PREFIX = "ATTNLENS_"
# Read by more than one command, or by none of them: docs/settings.md.
_OTHERS = {"CACHE_DIR", "DEBUG"}
# What Kubernetes and Docker set for a service or a container with our name.
_OF_A_SERVICE = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_URL_OF_A_SERVICE = re.compile(r"(tcp|udp|sctp)://.*")  # the value of NAME_PORT


def warn_of_unknown(
    root: click.Command, name: str, command: click.Command, commands: Collection[str]
) -> None:
    """Print one line on stderr if no option reads some of the variables ATTNLENS_*.

    The variables of `command`, which runs as `name`, are checked. Those of other `commands` are not: their
    options are not imported here.
    """
    given = [
        key.removeprefix(_PREFIX)
        for key, value in os.environ.items()
        if key.startswith(_PREFIX) and not _URL_OF_A_SERVICE.fullmatch(value)
    ]
    if not given:
        return
    from attnlens_cli.frame.server_options import SHARED_NAMES  # noqa: PLC0415 - for a few runs only

    own = _part(name)
    others = tuple(f"{_part(other)}_" for other in commands if other != name)
    known = {*_OTHERS, *SHARED_NAMES, *_names(root), *(f"{own}_{option}" for option in _names(command))}
    unknown = [
        key
        for key in given
        if key not in known and not key.startswith(others) and not _OF_A_SERVICE.fullmatch(key)
    ]
    if not unknown:
        return
    told = ", ".join(f"{_PREFIX}{printable(key)}{_suggestion(key, known)}" for key in sorted(unknown))
    with suppress(OSError):  # nobody reads stderr: the command runs all the same
        click.echo(f"warning: no option reads the variable{'s' * (len(unknown) > 1)} {told}", err=True)


def _part(name: str) -> str:
    return name.replace("-", "_").upper()


def _names(command: click.Command) -> Iterator[str]:
    """Yield the ends of the variables of the options of a command."""
    yield "HELP"
    yield from (str(option.name).upper() for option in command.params if isinstance(option, click.Option))


def _suggestion(key: str, known: Collection[str]) -> str:
    # Compared without the prefix: with it, all names look alike.
    return nearest(key, known).replace("did you mean ", f"did you mean {_PREFIX}")
