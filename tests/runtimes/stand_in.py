"""Fake runtime process with a selectable behavior: `stand_in.py BEHAVIOUR PRECISION GRAPH DIRECTORY`.

It runs the graph in ONNX Runtime, claims to compute in PRECISION, misbehaves on inputs of `LENGTH` tokens.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from attnlens_runtimes import FP32, Installed

LENGTH = 33


def stand_in(behavior: str, precision: str = FP32) -> Installed:
    """Return the runtime whose process behaves like that; if not in fp32, it can do that too and is right."""
    command = (sys.executable, __file__, behavior, precision)
    in_fp32 = () if precision == FP32 else (sys.executable, __file__, "works", FP32)
    return Installed("stand-in", "1.0", command, in_fp32)


def main() -> None:
    """Answer as a runtime's process does, until the behavior is called for."""
    behavior, precision, graph, directory = sys.argv[1:]
    if behavior == "hangs in one graph":
        behavior = "hangs" if Path(graph).name == "model.onnx" else "works"
    if behavior == "refuses the graph":
        answer({"error": "NotImplementedError: operator Erf"})
        return
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    answer({"precision": precision} if precision != FP32 else {})
    for line in sys.stdin:
        feed = {
            name: np.fromfile(f"{directory}/{name}.bin", kind).reshape(shape)
            for name, (kind, *shape) in json.loads(line).items()
        }
        outputs: list[Any] = session.run(None, feed)
        if feed["input_ids"].shape[1] == LENGTH:
            misbehave(behavior, outputs, feed["attention_mask"], Path(directory))
        for index, output in enumerate(outputs):
            output.tofile(f"{directory}/{index}.bin")
        answer({"outputs": [output.shape for output in outputs]})


def misbehave(behavior: str, outputs: list[Any], mask: np.ndarray[Any, Any], directory: Path) -> None:
    """Do it."""
    if behavior == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif behavior == "hangs":
        # Not at our pipes: who waits for their end would wait for this child, too.
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleep, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        Path(directory).joinpath("child").write_text(str(child.pid))
        time.sleep(600)
    elif behavior == "prints":
        sys.stdout.write("a remark\n")
        sys.stdout.flush()
    elif behavior == "exits":
        sys.exit("out of luck")
    elif behavior == "refuses an input":
        answer({"error": "RuntimeError: 33 is no good"})
        sys.exit()
    else:
        falsify(behavior, outputs, mask)


def falsify(behavior: str, outputs: list[Any], mask: np.ndarray[Any, Any]) -> None:
    """Return something else."""
    if behavior == "drops an output":
        outputs.pop()
    elif behavior == "is a little off":
        outputs[0][np.nonzero(mask)] += 1e-3
    elif behavior == "is far off":
        outputs[0][-1, 0] *= np.linspace(0.9, 1.1, outputs[0].shape[-1])
    elif behavior == "attends to padding":
        outputs[-1][np.broadcast_to(mask[:, None, None] == 0, outputs[-1].shape)] = 1e-4
    elif behavior == "gives NaN for padding":
        outputs[0][np.nonzero(mask == 0)] = np.nan


def answer(content: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
