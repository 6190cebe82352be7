"""Process of a graph in a Python runtime.

    python -m attnlens_runtimes.worker NAME [--settings JSON] GRAPH DIR

Requests and responses are lines of JSON on stdin and stdout:

- After opening the graph: `{"precision": "bf16", "processor": "..."}`, or `{}` for fp32.
- For each request with types and shapes of inputs, `{"input_ids": ["int64", B, T], ...}`: the shapes of the
  outputs in the order of the graph, `{"outputs": [[B, T, D], ...]}`.
- On failure: `{"error": REASON}`, then the process exits.

`--settings` contains compilation settings, `[{PROPERTY: VALUE, ...}, DEVICE]`. By default, the runtime uses
its own.

Tensors are exchanged as files in DIR, row-major and little-endian: inputs as int64 or float32 in
`input_ids.bin` etc., outputs as float32 in `0.bin`, `1.bin` etc. `node/worker.mjs` implements the same
protocol.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from attnlens_runtimes.registry import RUNTIMES
from attnlens_runtimes.runtime import SETTINGS_OPTION, STORED, Feed, Opened, PythonRuntime, Settings


def main() -> None:
    """Serve the graph until stdin is closed."""
    name, *options, graph, directory = sys.argv[1:]
    replies = _own_stdout()
    try:
        run, precision, processor = _open(name, options, Path(graph))
        _reply(replies, {"precision": precision, "processor": processor})
        for line in sys.stdin:
            outputs = run(_read_feed(json.loads(line), Path(directory)))
            for index, output in enumerate(outputs):
                output.astype("<f4", copy=False).tofile(Path(directory) / f"{index}.bin")
            _reply(replies, {"outputs": [list(output.shape) for output in outputs]})
    except Exception as error:  # noqa: BLE001 - any exception of a runtime is reported
        _reply(replies, {"error": _one_line(error)})


def _open(name: str, options: Sequence[str], graph: Path) -> Opened:
    runtime = RUNTIMES[name]
    if not isinstance(runtime, PythonRuntime):
        raise TypeError(f"{name} is not a Python runtime")
    match options:
        case []:
            return runtime.open_graph(graph)
        case [option, settings] if option == SETTINGS_OPTION and runtime.open_with:
            return runtime.open_with(graph, Settings(*json.loads(settings)))
    raise TypeError(f"{name} does not support {' '.join(options)}")


def _own_stdout() -> TextIO:
    """Return the original stdout, and redirect stdout to stderr for runtimes that print."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _reply(replies: TextIO, content: dict[str, object]) -> None:
    replies.write(json.dumps(content) + "\n")
    replies.flush()


def _read_feed(described: dict[str, list[Any]], directory: Path) -> Feed:
    return {
        name: np.fromfile(directory / f"{name}.bin", STORED[kind], math.prod(shape)).reshape(shape)
        for name, (kind, *shape) in described.items()
    }


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    main()
