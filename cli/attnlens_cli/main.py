"""Where the `attnlens` script starts. Imports nothing that the base install lacks."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line and leave with its exit code."""
    if any(find_spec(name) is None for name in ("click", "rich")):
        sys.stderr.write("attnlens: the command line needs an extra: pip install 'attnlens[cli]'\n")
        sys.exit(2)
    from attnlens_cli.app import run  # noqa: PLC0415 - imports click, which may be missing

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
