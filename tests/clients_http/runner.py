"""Runs checks in the environment of their clients: `python -m clients_http.runner SERVER RESULTS MODULE...`.

Writes a JSON file with the traceback of each check, or null if it passed, by `MODULE::CHECK`, and the
durations to stderr.
"""

import importlib
import json
import sys
import time
import traceback
from pathlib import Path

from clients_http.server_under_test import Server


def main(server: str, results: str, *modules: str) -> None:
    under_test = Server.read(Path(server))
    found: dict[str, str | None] = {}
    for module in modules:
        checks = vars(importlib.import_module(f"clients_http.{module}"))
        for name, check in list(checks.items()):  # a warning adds a variable to its module
            if name.startswith("check_"):
                started = time.monotonic()
                try:
                    check(under_test)
                except Exception:  # noqa: BLE001 - reported as the result
                    found[f"{module}::{name}"] = traceback.format_exc()
                else:
                    found[f"{module}::{name}"] = None
                sys.stderr.write(f"{module}::{name}: {time.monotonic() - started:.1f} s\n")
    Path(results).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
