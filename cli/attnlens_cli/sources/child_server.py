"""A server for one command: a child process on a free port, which ends with the block."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from attnlens_cli.frame.stopping import parent_variable
from attnlens_cli.sources.resolve import ended, without_options

_READY = re.compile(r" is ready at (\S+?)[:,]?\s")
_STOP_TIMEOUT_S = 10
_LAST_WORDS_S = 5  # for a child that has said why it ends


@contextmanager
def child_server(bundle: Path, options: Sequence[str]) -> Iterator[str]:
    """Serve a bundle with further options until the block ends. Yields the address.

    Raises:
        click.exceptions.Exit: it did not start, and has said why on stderr.
        click.ClickException: it was killed.
    """
    child = subprocess.Popen(  # noqa: S603 - our own program; no shell reads the arguments
        [
            *(sys.executable, "-P", "-m", "attnlens_cli.main", "--log-level", "error"),
            *("serve", str(bundle), "--port", "0", *options),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=without_options() | parent_variable(),
        start_new_session=True,  # Ctrl-C comes to the command alone, which ends its server
        encoding="utf-8",
    )
    with child:
        try:
            assert child.stdout is not None  # noqa: S101 - for the type checker
            ready = _READY.search(child.stdout.readline())
            if ready is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LAST_WORDS_S)
                _stop(child)
                raise ended("the server", child.returncode)
            yield ready[1]
        finally:
            _stop(child)


def _stop(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
