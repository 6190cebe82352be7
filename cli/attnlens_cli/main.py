"""Where the `attnlens` script starts. Imports nothing that the base install lacks."""

import io
import os
import sys
from importlib.util import find_spec

from attnlens_cli.frame.extras import how_to_install


def main() -> None:
    """Run the command line and leave with its exit code."""
    _prepare_streams()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its failures come as exceptions, too
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # see attnlens_server; exports use it too
    if any(find_spec(name) is None for name in ("click", "rich")):
        sys.stderr.write(f"attnlens: the command line is not installed: {how_to_install('cli')}\n")
        sys.exit(2)
    from attnlens_cli.app import run  # noqa: PLC0415 - imports click, which may be missing
    from attnlens_cli.frame.stopping import end_with_parent  # noqa: PLC0415

    end_with_parent()
    sys.exit(run(sys.argv[1:]))


def _prepare_streams() -> None:
    """Open standard streams that are closed, and replace characters that a stream cannot show."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, so that no socket gets it
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for the whole run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")


if __name__ == "__main__":
    main()
