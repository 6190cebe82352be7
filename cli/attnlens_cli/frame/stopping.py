"""Signals that end a command which has files or processes to clean up."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

_PARENT = "_ATTNLENS_PARENT"  # set for a child: the id of the process that it must not outlive
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def parent_variable() -> dict[str, str]:
    """Return the environment variable for a child that calls `end_with_parent`."""
    return {_PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """If a parent asks for it, get SIGTERM when that parent is killed. Linux only.

    The child asks the system itself: code between fork and exec is unsafe once gRPC is loaded.
    """
    parent = os.environ.pop(_PARENT, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:  # it was killed before
        os.kill(os.getpid(), signal.SIGTERM)


class _Stopped(BaseException):
    """A signal came. Not an Exception, so that no `except Exception` catches it."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Clean up on SIGTERM and SIGHUP as on Ctrl-C, then exit with the code of the signal."""

    def stop(number: int, _frame: FrameType | None) -> None:
        # A second one must not interrupt the cleaning up.
        for changed in previous:
            signal.signal(changed, signal.SIG_IGN)
        raise _Stopped(number)

    # Ignored signals stay ignored: nohup relies on it.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    previous = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    try:
        for number in previous:
            signal.signal(number, stop)
        yield
    except _Stopped as stopped:
        received = signal.Signals(stopped.args[0])
        click.echo(f"{click.get_current_context().command_path}: stopped by {received.name}", err=True)
        raise click.exceptions.Exit(128 + received) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
