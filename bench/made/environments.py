"""Virtual environments of the peers, created in `.bench/` from pinned requirements."""

import hashlib
import subprocess
import sys
from pathlib import Path

from bench.lines import ROOT, ProcessError

DIRECTORY = ROOT / ".bench"
REQUIREMENTS = ROOT / "bench" / "peers"
ISOLATED = {"PYTHONPATH": ""}  # hide attnlens packages from peer environments


def environment_python(name: str) -> Path:
    """Return the Python interpreter of an environment. Created if missing or outdated.

    Raises:
        ProcessError: If pip fails.
    """
    directory, requirements = DIRECTORY / name, REQUIREMENTS / f"{name}.txt"
    stamp = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp_path = directory / "requirements.sha256"
    python = directory / "bin" / "python"
    if not stamp_path.is_file() or stamp_path.read_text() != stamp:
        print(
            f"Creating environment {name}. This takes minutes and up to 2 GB ...", file=sys.stderr, flush=True
        )
        _run([sys.executable, "-m", "venv", "--clear", str(directory)], name)
        _run([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)], name)
        stamp_path.write_text(stamp)
    return python


def _run(command: list[str], name: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        errors = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")]
        raise ProcessError(f"environment {name}: {errors[-1] if errors else finished.stderr[-200:]}")
