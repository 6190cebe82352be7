"""Signals that end a command which has files or processes to clean up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click


class _Stopped(BaseException):
    """A signal came; no Exception, so that nothing takes it for a failure of its own."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Clean up on SIGTERM and SIGHUP as on Ctrl-C, then exit with the code of the signal."""

    def stop(number: int, _frame: FrameType | None) -> None:
        # A second one must not interrupt the cleaning up.
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    # What is ignored stays so: that is how nohup works.
    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    previous = {each: signal.getsignal(each) for each in numbers}
    try:
        for each in numbers:
            signal.signal(each, stop)
        yield
    except _Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        click.echo(f"{click.get_current_context().command_path}: stopped by {number.name}", err=True)
        raise click.exceptions.Exit(128 + number) from None
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
