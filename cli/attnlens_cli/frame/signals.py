"""Signal handling of commands that have files or processes to clean up."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

# Environment variable with the id of the parent process that the child must not outlive.
_PARENT = "_ATTNLENS_PARENT"
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def parent_variable() -> dict[str, str]:
    """Return the environment variable for a child process that calls `end_with_parent`."""
    return {_PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Ask the kernel to send SIGTERM when the parent dies, if the parent requested it. Linux only.

    The child makes the request itself: running code between fork and exec is unsafe once gRPC is loaded.
    """
    parent = os.environ.pop(_PARENT, "")
    if not parent or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:  # the parent died before the request
        os.kill(os.getpid(), signal.SIGTERM)


class _Stopped(BaseException):
    """A signal was received. Not an Exception, so that no `except Exception` catches it."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Clean up on SIGTERM and SIGHUP as on Ctrl-C, then exit with the code of the signal."""

    def stop(number: int, _frame: FrameType | None) -> None:
        # A second signal must not interrupt the cleanup.
        for changed in previous:
            signal.signal(changed, signal.SIG_IGN)
        raise _Stopped(number)

    previous = {number: signal.getsignal(number) for number in _active_signals()}
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


def interrupt_on_signals() -> None:
    """Handle SIGTERM and SIGHUP like SIGINT, so that a stopped command leaves no partial file."""
    for number in _active_signals():
        signal.signal(number, _interrupt)


def _active_signals() -> list[signal.Signals]:
    """Return SIGTERM and SIGHUP unless they are ignored: nohup relies on an ignored SIGHUP."""
    return [
        number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
    ]


def _interrupt(_number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)
