"""Converts bundles to openvino-genai models in `.bench/`."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.lines import ROOT, ProcessError
from bench.made.environments import DIRECTORY, ISOLATED, environment_python

ENVIRONMENT = "openvino_genai"


def convert(bundle: Path, name: str, texts: Sequence[str], max_tokens: int) -> Path:
    """Return a directory with `fp32` and `int8` models. Recreated if the graph or texts change.

    Args:
        bundle: Bundle with the `onnx/model.onnx` to convert.
        name: Directory name.
        texts: Calibration texts for NNCF.
        max_tokens: Maximum length of the calibration texts, in tokens.

    Raises:
        ProcessError: If the environment or the conversion fails.
    """
    directory = DIRECTORY / "models" / name
    hashed = hashlib.sha256((bundle / "onnx" / "model.onnx").read_bytes())
    hashed.update(json.dumps(texts).encode())
    stamp_path = directory / "source.sha256"
    if stamp_path.is_file() and stamp_path.read_text() == hashed.hexdigest():
        return directory
    python = environment_python(ENVIRONMENT)
    print(f"Converting {bundle} for openvino-genai. This takes minutes ...", file=sys.stderr, flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    texts_path = directory / "calibration.json"
    texts_path.write_text(json.dumps(texts), encoding="utf-8")
    command = [python, "-m", "bench.peers.convert_openvino_genai", bundle, directory, texts_path, max_tokens]
    finished = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **ISOLATED},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise ProcessError(f"conversion for openvino-genai: {finished.stderr.strip().splitlines()[-1]}")
    stamp_path.write_text(hashed.hexdigest())
    return directory
