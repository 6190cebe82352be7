"""A server that pages of another origin may call, and where the client runs: Node.js and Chromium."""

import functools
import http.server
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from opened_page import launched_browser
from served import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "client" / "typescript"
LIBRARY = CLIENT / "lib" / "index.js"
SCENARIOS = Path(__file__).parent / "scenarios.mjs"
PAGE_SCRIPT = f"""async ([name, ...parameters]) => {{
  const scenarios = await import("/{SCENARIOS.relative_to(ROOT)}");
  return scenarios[name](await import("/{LIBRARY.relative_to(ROOT)}"), ...parameters);
}}"""
MAX_TEXTS = 4  # one client may hold two thirds of them, which is 3

Run = Callable[..., Any]
"""Runs a function of scenarios.mjs with the library and the given parameters, and returns its result."""


class Server(NamedTuple):
    """A server process.

    Attributes:
        process: The process.
        url: URL of its HTTP port.
        origin: Origin of pages that may call it.
    """

    process: ServerProcess
    url: str
    origin: str

    def status(self, request_id: str) -> str:
        """Wait for the log line of a request, and return its status."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            lines = map(json.loads, self.process.log().rpartition("\n")[0].splitlines())
            for line in lines:
                if line.get("request_id") == request_id:
                    return str(line["status"])
            time.sleep(0.02)
        pytest.fail(f"no line was written for {request_id}")


class _Files(http.server.SimpleHTTPRequestHandler):
    """Serves the repository, and an empty page at `/empty`."""

    def do_GET(self) -> None:
        if self.path != "/empty":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>empty</title><link rel=icon href=data:,>")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass


@contextmanager
def _file_server() -> Iterator[int]:
    handler = functools.partial(_Files, directory=str(ROOT))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="package")
def server(minilm_bundle: Path) -> Iterator[Server]:
    with _file_server() as port:
        origin = f"http://127.0.0.1:{port}"
        options = ("--http-port", "0", "--cors-origins", origin, "--access-log", "all")
        limits = ("--max-concurrent-inputs", str(MAX_TEXTS), "--max-inputs-per-request", str(MAX_TEXTS))
        with ServerProcess(minilm_bundle, *options, *limits) as process:
            yield Server(process, process.http_url(), origin)


@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    with launched_browser() as browser:
        yield browser


@pytest.fixture(scope="package")
def node_modules() -> Path:
    modules = CLIENT / "node_modules"
    if shutil.which("node") is None or not modules.exists():
        pytest.fail("Node.js or its packages are not installed: run make typescript")
    return modules


def run_in_node(*parameters: Any) -> Any:
    command: list[str | Path] = ["node", SCENARIOS, LIBRARY.as_uri()]
    result = subprocess.run(
        command, input=json.dumps(parameters), capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout) if result.stdout.strip() != "undefined" else None


@contextmanager
def opened_in(browser: "Browser", origin: str) -> Iterator[Run]:
    """Open a page of an origin that runs scenarios."""
    page = browser.new_page()
    page.goto(f"{origin}/empty")
    yield lambda *parameters: page.evaluate(PAGE_SCRIPT, list(parameters))
    page.close()


@pytest.fixture(scope="package", params=["node", "chromium"])
def run(request: pytest.FixtureRequest, server: Server) -> Iterator[Run]:
    if request.param == "node":
        request.getfixturevalue("node_modules")
        yield run_in_node
        return
    with opened_in(request.getfixturevalue("browser"), server.origin) as run:
        yield run
