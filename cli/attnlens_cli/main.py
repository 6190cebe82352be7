"""Entry point of the `attnlens` script. Imports only what the base installation includes."""

import gc
import io
import os
import sys
from importlib.util import find_spec

from attnlens_cli import how_to_install


def main() -> None:
    """Run the command line and exit with its code."""
    _prepare_streams()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its failures are also raised as exceptions
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as in attnlens_server, but for exports
    # Spinning threads of PyTorch would slow down ONNX Runtime in a concurrent thread of an export.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if any(find_spec(name) is None for name in ("click", "rich")):
        sys.stderr.write(f"attnlens: the command line is not installed: {how_to_install('cli')}\n")
        sys.exit(2)
    from attnlens_cli.app import run  # noqa: PLC0415 - imports click, which may be missing
    from attnlens_cli.frame.signals import end_with_parent  # noqa: PLC0415

    end_with_parent()
    code = run(sys.argv[1:])
    gc.freeze()  # otherwise, the interpreter collects garbage when it exits: 0.8 s after an export
    sys.exit(code)


def _prepare_streams() -> None:
    """Open closed standard streams, and let streams replace characters that they cannot encode."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # occupies the descriptor, so that no socket gets it
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for the whole run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")


if __name__ == "__main__":
    main()
