"""List the modules that one warm call enters, from the client's method to its result.

    python tests/request_path.py BUNDLE embed
    python tests/request_path.py BUNDLE explain

The server runs on the main thread and the client on another one; the call goes over a real connection. A
profile function records the file of each Python function that any thread enters. The list contains the
modules that each of three equal calls enters, so it excludes work that happens once, such as opening a second
session.
"""

# ruff: noqa: T201 - the list is this program's output

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("client", "protos", "server"))
TEXT, OTHER = "A man is playing a guitar.", "Someone plays an instrument."
WARMUP_CALLS, RECORDED_CALLS = 2, 3


class Recorder:
    """Records the files of the functions that threads enter during each call, in order of first entry."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: list[dict[str, None]] = []

    def install(self) -> None:
        """Record the current thread and those that start later."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def start_call(self) -> None:
        """Start a new list."""
        self.calls.append({})
        self.is_on = True

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            self.calls[-1].setdefault(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))


def entered_modules(bundle: Path, method: str) -> list[str]:
    """Return the modules that a call enters, relative to the repository."""
    recorder = Recorder()
    recorder.install()
    # Threads of the libraries must start after `install`.
    from attnlens_client import Client  # noqa: PLC0415
    from attnlens_server.config import ServerConfig  # noqa: PLC0415
    from attnlens_server.server import Ready, Server  # noqa: PLC0415

    def call(address: str) -> None:
        try:
            with Client(address) as client:
                for _ in range(WARMUP_CALLS + RECORDED_CALLS):
                    recorder.start_call()
                    if method == "embed":
                        client.embed([TEXT])
                    else:
                        client.explain([TEXT], to=OTHER)
                recorder.is_on = False
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(ready: Ready) -> None:
        threading.Thread(target=call, args=(ready.address,)).start()

    asyncio.run(Server(ServerConfig(bundle=bundle, port=0)).run(on_ready))
    first, *others = recorder.calls[WARMUP_CALLS:]
    return [file for file in first if all(file in other for other in others)]


if __name__ == "__main__":
    print("\n".join(entered_modules(Path(sys.argv[1]), sys.argv[2])))
