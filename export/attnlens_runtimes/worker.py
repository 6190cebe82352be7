"""The process of a graph in a Python runtime.

    python -m attnlens_runtimes.worker NAME [--settings JSON] GRAPH DIR

It answers on standard output, one line of JSON each. Once the graph is open, that is what it computes in and
where, as `{"precision": "bf16", "processor": "..."}`; `{}` means fp32. Then for each line of input, types and
shapes of the inputs as `{"input_ids": ["int64", B, T], ...}`, it is the shapes of the outputs in the graph's
order as `{"outputs": [[B, T, D], ...]}`. Instead of either it may say `{"error": REASON}` and end.

With --settings the graph is compiled with these, `[{PROPERTY: VALUE, ...}, DEVICE]`, else with the runtime's
defaults.

The tensors themselves are in DIR, row-major and little-endian: inputs in `input_ids.bin` and so on, as int64
or float32, outputs as float32 in `0.bin`, `1.bin` and so on. `node/worker.mjs` does the same.
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
    """Serve the graph until standard input ends."""
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
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises is its answer
        _reply(replies, {"error": _one_line(error)})


def _open(name: str, options: Sequence[str], graph: Path) -> Opened:
    runtime = RUNTIMES[name]
    if not isinstance(runtime, PythonRuntime):
        raise TypeError(f"{name} is no runtime of Python")
    match options:
        case []:
            return runtime.open_graph(graph)
        case [option, settings] if option == SETTINGS_OPTION and runtime.open_with:
            return runtime.open_with(graph, Settings(*json.loads(settings)))
    raise TypeError(f"{name} has no {' '.join(options)}")


def _own_stdout() -> TextIO:
    """Return standard output, which a runtime that prints no longer reaches."""
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
