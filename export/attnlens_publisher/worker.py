"""Process that has imported transformers, and runs each request in a copy of itself.

    python -m attnlens_publisher.worker

Requests and replies are lines of JSON on stdin and stdout. A request is `{"function": "MODULE:NAME",
"arguments": {...}, "imports": [...], "max_bytes": N, "timeout_s": N}`. Replies to one request:

- `{"progress": [DETAIL, DONE, TOTAL]}`, any number of them.
- `{"result": VALUE}`, `{"missing": PACKAGE}`, `{"refused": REASON}` or `{"error": REASON}`.
- `{"ended": SIGNAL}` when the copy has ended, 0 if it was not killed.

A request with imports alone has no reply.

Imports of these libraries take seconds, so they are done once. The copy is made before PyTorch has started a
thread, and ends after its request: what the libraries change, such as a registry of classes, is gone.
"""

import importlib
import json
import os
import resource
import signal
import sys
import warnings
from typing import Any, TextIO

from attnlens_publisher.errors import RefusedError

# Before the libraries are imported. A checkpoint is complete: nothing is looked up on the hub.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",  # threads would be missing in the copy
}
_MAX_REASON = 300


def main() -> None:
    """Answer requests until stdin is closed."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")
    replies = _own_stdout()
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imports"]:
            try:
                importlib.import_module(name)
            except ImportError:  # the function that needs it reports it
                continue
        if "function" not in request:
            continue
        copy = os.fork()
        if not copy:
            _answer(request, replies)
            os._exit(0)
        _, status = os.waitpid(copy, 0)
        _reply(replies, "ended", os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _answer(request: dict[str, Any], replies: TextIO) -> None:
    try:
        # Anonymous memory: libraries map files of any size.
        resource.setrlimit(resource.RLIMIT_DATA, (request["max_bytes"],) * 2)
        signal.alarm(request["timeout_s"])  # without a handler, it ends the process
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)

        def report(detail: str, done: int, total: int) -> None:
            _reply(replies, "progress", [detail, done, total])

        _reply(replies, "result", function(report, **request["arguments"]))
    except RefusedError as error:
        _reply(replies, "refused", str(error))
    except MemoryError:
        _reply(replies, "error", f"it needs more than {request['max_bytes'] / 1e9:.1f} GB of memory")
    except ImportError as error:
        _reply(replies, "missing", (error.name or str(error)).partition(".")[0].replace("_", "-"))
    except BaseException as error:  # noqa: BLE001 - invalid files can raise anything in these libraries
        _reply(replies, "error", f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}")


def _own_stdout() -> TextIO:
    """Return stdout for replies alone; what libraries print is dropped."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    return replies


def _reply(replies: TextIO, kind: str, value: Any) -> None:  # noqa: ANN401 - any JSON value
    replies.write(json.dumps({kind: value}) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
