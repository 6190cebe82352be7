"""`attnlens` in child processes: an export, and a temporary server."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from attnlens_cli.frame.failures import REPORTED_COMMAND
from attnlens_cli.frame.signals import parent_variable

_READY = re.compile(r" is ready at (\S+?)[:,]?\s")
_STOP_TIMEOUT_S = 10
_EXIT_TIMEOUT_S = 5  # time for a child to exit after it has reported its failure


def run_export(source: str, options: Sequence[str], lock: int) -> None:
    """Export a checkpoint.

    A child process keeps PyTorch out of this process. The child also holds `lock`, so that the lock is kept
    until the export has ended, even if this process is killed.

    Raises:
        click.exceptions.Exit: The export failed and printed the reason on stderr.
        click.ClickException: The child was killed.
    """
    child = subprocess.Popen(  # noqa: S603 - our own program, without a shell
        [sys.executable, "-P", "-m", "attnlens_cli.main", "export", *options, "--", source],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # stdout of this process is for the ready line
        env=_environment() | {REPORTED_COMMAND: click.get_current_context().command_path},
        pass_fds=[lock],
        start_new_session=True,  # Ctrl-C reaches this process only, which stops the child
    )
    try:
        code = _wait(child)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if code:
        raise _failure(f"the export of {source}", code)


@contextmanager
def child_server(bundle: Path, options: Sequence[str]) -> Iterator[str]:
    """Serve a bundle on a free port until the block ends. Yields the address.

    Raises:
        click.exceptions.Exit: The server did not start and printed the reason on stderr.
        click.ClickException: The child was killed.
    """
    child = subprocess.Popen(  # noqa: S603 - our own program, without a shell
        [
            *(sys.executable, "-P", "-m", "attnlens_cli.main", "--log-level", "error"),
            *("serve", str(bundle), "--port", "0", *options),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=_environment(),
        start_new_session=True,  # Ctrl-C reaches this process only, which stops the child
        encoding="utf-8",
    )
    with child:
        try:
            assert child.stdout is not None  # noqa: S101 - for the type checker
            ready = _READY.search(child.stdout.readline())
            if ready is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_EXIT_TIMEOUT_S)
                _stop(child)
                raise _failure("the server", child.returncode)
            yield ready[1]
        finally:
            _stop(child)


def _environment() -> dict[str, str]:
    """Return the environment of a child, without option variables, which apply to the user's command only."""
    return parent_variable() | {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("ATTNLENS_") or key == "ATTNLENS_DEBUG"
    }


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Return the exit code.

    Polls, because a signal that arrives just before an unlimited wait would not interrupt it.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=1)


def _stop(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _failure(name: str, code: int) -> Exception:
    """Return the exception for a failed child."""
    if code < 0:
        return click.ClickException(f"{name} was killed by signal {-code}; 9 often means that memory ran out")
    return click.exceptions.Exit(code)
