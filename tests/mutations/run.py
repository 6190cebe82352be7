"""Mutation testing: break one behavior at a time in a copy of the sources and run the tests that must fail.

    python tests/mutations/run.py                      all mutations
    python tests/mutations/run.py --area attention     mutations in attention.toml
    python tests/mutations/run.py --ids ID ID          some of them

Each *.toml file in this directory contains the mutations of one area. A mutation replaces `old`, which must
occur exactly once in `file`, by `new`. `blind = true` marks mutations chosen before looking at any test. When
sources move, update `file`, `old` and `new`; the id and the behavior that it breaks stay.
"""

# ruff: noqa: T201 - the verdicts are this program's output

import argparse
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("protos", "model", "export", "server", "client", "viewer", "cli", "analysis", "bulk")
TIMEOUT_S = 900  # pytest-timeout fails a test that hangs long before
# Each run is a fork of this process, which has loaded the slow libraries, but none of ours.
FORKED = multiprocessing.get_context("fork")
PRELOADED = ("numpy", "google.protobuf.json_format", "grpc.aio", "onnx", "onnxruntime", "tokenizers", "torch")

PASSED, FAILED = 0, 1  # pytest exit codes; all others give no verdict
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Mutation:
    """A change of one source file that breaks a behavior.

    Attributes:
        id: Unique and permanent.
        area: Name of the TOML file.
        breaks: The behavior that the mutation breaks, in one sentence.
        file: Path of the source file, relative to the repository root.
        old: Text that occurs exactly once in the file.
        new: Its replacement.
        tests: pytest node ids, of which at least one must fail.
        blind: Whether the mutation was chosen without knowledge of the tests.
    """

    id: str
    area: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    blind: bool = False

    def anchor_problem(self, root: Path) -> str | None:
        """Return why the mutation cannot be applied to the sources in `root`, or None if it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.id}: {self.file} does not exist: re-anchor it"
        count = path.read_text(encoding="utf-8").count(self.old)
        return None if count == 1 else f"{self.id}: `old` occurs {count} times in {self.file}: re-anchor it"


def read_mutations(directory: Path = HERE) -> list[Mutation]:
    """Return the mutations of all areas."""
    return [
        Mutation(area=path.stem, **entry | {"tests": tuple(entry["tests"])})
        for path in sorted(directory.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    ]


class Sandbox:
    """A copy of the checkout's tracked and new files, in which mutations are applied one at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._time = int(time.time())
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)

    def run(self, tests: Sequence[str], timeout_s: float | None = None) -> tuple[int, str]:
        """Run tests until one fails or the time is up; return pytest's exit code and its output."""
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            process = FORKED.Process(target=self._run_pytest, args=(tests, output.fileno()))
            process.start()
            process.join(timeout_s)
            if process.exitcode is None:
                assert process.pid is not None
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
            output.seek(0)
            code = process.exitcode
            return KILLED if code is None else code, output.read()

    def _run_pytest(self, tests: Sequence[str], output: int) -> None:
        """Run pytest on the copy. The process has a session of its own, so that it ends with its children."""
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(self.root)
        paths = [str(self.root / package) for package in PACKAGES]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of the commands that tests start
        sys.exit(pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests]))

    def run_mutated(self, mutation: Mutation) -> tuple[int, str]:
        """Apply a mutation, run its tests and undo it."""
        path = self.root / mutation.file
        original = path.read_text(encoding="utf-8")
        self._write(path, original.replace(mutation.old, mutation.new))
        try:
            return self.run(mutation.tests, TIMEOUT_S)
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        """Write a source file with a modification time of its own: Python compares it to reuse bytecode."""
        path.write_text(text, encoding="utf-8")
        self._time += 1
        os.utime(path, (self._time, self._time))


def run_all(mutations: Sequence[Mutation]) -> int:
    """Print the verdict of each mutation and a summary; return the exit code."""
    problems = [problem for mutation in mutations if (problem := mutation.anchor_problem(ROOT))]
    if problems:
        print(*problems, sep="\n")
        return 1
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        sandbox = Sandbox(Path(directory))
        named = sorted({test for mutation in mutations for test in mutation.tests})
        code, output = sandbox.run(named)
        if code != PASSED:
            print(output, "the named tests do not pass without a mutation", sep="\n")
            return 1
        survivors = list(_survivors(sandbox, mutations))
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} mutations killed")
    for mutation in survivors:
        print(f"  {mutation.id}: {mutation.breaks}")
    return 1 if survivors else 0


def _survivors(sandbox: Sandbox, mutations: Sequence[Mutation]) -> Iterator[Mutation]:
    """Print the verdict of each mutation; yield those that were not killed."""
    for mutation in mutations:
        started = time.monotonic()
        code, output = sandbox.run_mutated(mutation)
        verdict = {FAILED: "killed", PASSED: "SURVIVED"}.get(code, "NOT RUN")
        print(f"{verdict:8}  {mutation.id:40}  {time.monotonic() - started:5.1f} s", flush=True)
        if verdict == "NOT RUN":
            print(output)
        if verdict != "killed":
            yield mutation


def main() -> int:
    """Run the mutations that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ids", nargs="+", default=[], metavar="ID", help="run these mutations")
    parser.add_argument("--area", default="", help="run the mutations of one area")
    chosen = parser.parse_args()
    mutations = read_mutations()
    unknown = {*chosen.ids} - {mutation.id for mutation in mutations}
    if unknown:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}")
    selected = [
        mutation
        for mutation in mutations
        if (not chosen.ids or mutation.id in chosen.ids) and chosen.area in ("", mutation.area)
    ]
    if not selected:
        parser.error(
            f"area {chosen.area!r} has no mutations: choose one of "
            f"{', '.join(sorted({mutation.area for mutation in mutations}))}"
        )
    return run_all(selected)


if __name__ == "__main__":
    sys.exit(main())
