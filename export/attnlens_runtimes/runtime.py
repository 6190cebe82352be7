"""What a runtime is: a name, how it is installed, and the command that starts a process which runs a graph.

B batch, T tokens.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

Feed = Mapping[str, npt.NDArray[Any]]
"""The inputs by name, int64 or float32, in the order of the graph's inputs."""

STORED = {"int64": "<i8", "float32": "<f4"}
"""How inputs lie in the files that are exchanged, by their type."""

Run = Callable[[Feed], Sequence[npt.NDArray[Any]]]
"""Runs an open graph and returns every output in the graph's order."""

FP32 = "fp32"


class Opened(NamedTuple):
    """A graph that a runtime has opened."""

    run: Run
    precision: str = FP32
    """What it computes in, as the runtime says: fp32, bf16 or fp16."""
    processor: str = ""
    """Where it computes: the processor's own name, as the runtime tells it."""


class Settings(NamedTuple):
    """How a graph is compiled, where that is not left to the runtime."""

    properties: Mapping[str, str]
    """Values by the runtime's own names."""
    device: str = ""
    """The runtime's name for it; empty: its default."""


# Of the worker: compile with the settings that follow, as a JSON array of their fields.
SETTINGS_OPTION = "--settings"
_PACKAGE = "package.json"
NODE_RUNNER = Path(__file__).parent / "node" / "worker.mjs"


class NotInstalledError(Exception):
    """A runtime is not there; the message says how to install it."""


@dataclass(frozen=True)
class Installed:
    """A runtime that is there.

    Attributes:
        name: what `--runtime` calls it.
        version: of its package.
        command: starts its process, given the graph and the directory for tensors as two more arguments.
        fp32_command: the same, made to compute in fp32; empty where nothing needs to be said for that.
    """

    name: str
    version: str
    command: tuple[str, ...]
    fp32_command: tuple[str, ...] = ()


class Runtime(Protocol):
    """One way to run a graph."""

    @property
    def name(self) -> str:
        """What `--runtime` calls it."""

    def find(self, node_modules: Path | None) -> Installed:
        """Return it as it is installed; packages of npm may be in `node_modules`.

        Raises:
            NotInstalledError: it is not.
        """


@dataclass(frozen=True)
class PythonRuntime:
    """A runtime that this Python can import.

    Attributes:
        name: what `--runtime` calls it.
        distributions: the packages of PyPI that bring it, the recommended one first, whose versions count.
        open_graph: opens an ONNX file with the defaults; runs in the runtime's own process and imports the
            runtime there.
        also: further packages that it needs.
        open_with: the same with chosen settings, where the runtime has any.
        fp32_settings: those that make it compute in fp32, where its defaults may be another precision.
    """

    name: str
    distributions: tuple[str, ...]
    open_graph: Callable[[Path], Opened]
    also: tuple[str, ...] = ()
    open_with: Callable[[Path, Settings], Opened] | None = None
    fp32_settings: Settings | None = None

    def find(self, node_modules: Path | None) -> Installed:  # noqa: ARG002 - the protocol's
        """Return the version of the package that is installed."""
        versions = [*filter(None, map(_version_of, self.distributions))]
        if not versions or not all(map(_version_of, self.also)):
            packages = " ".join((self.distributions[0], *self.also))
            raise NotInstalledError(f"{self.name} is not installed: pip install {packages}")
        in_fp32 = self.command(self.fp32_settings) if self.fp32_settings else ()
        return Installed(self.name, versions[0], self.command(), in_fp32)

    def command(self, settings: Settings | None = None) -> tuple[str, ...]:
        """Return the command of a process that opens a graph with these settings; None: with the defaults."""
        # -P: a file in the current directory must not pass for one of the runtime's modules.
        command = (sys.executable, "-P", "-m", "attnlens_runtimes.worker", self.name)
        return command if settings is None else (*command, SETTINGS_OPTION, json.dumps(settings))


@dataclass(frozen=True)
class NodeRuntime:
    """A package of npm that runs in Node.js, and whose name is what `--runtime` calls it."""

    name: str

    def find(self, node_modules: Path | None) -> Installed:
        """Return the version in the nearest `node_modules`."""
        node = shutil.which("node")
        if node is None:
            raise NotInstalledError(f"{self.name} needs Node.js: `node` is not on the PATH")
        places = [node_modules] if node_modules else list(_node_modules())
        package = next((each / self.name for each in places if (each / self.name / _PACKAGE).is_file()), None)
        if package is None:
            where = str(node_modules) if node_modules else "node_modules here or above, or in NODE_PATH"
            raise NotInstalledError(
                f"{self.name} is not installed: npm install {self.name} (looked in {where})"
            )
        try:
            version = str(json.loads((package / _PACKAGE).read_text(encoding="utf-8"))["version"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise NotInstalledError(
                f"{package / _PACKAGE} is damaged: npm install {self.name} again ({error})"
            ) from error
        return Installed(self.name, version, (node, str(NODE_RUNNER), str(package.resolve())))


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _node_modules() -> Iterator[Path]:
    """Yield where Node.js would look for a package, starting from the current directory."""
    here = Path.cwd()
    yield from (directory / "node_modules" for directory in (here, *here.parents))
    yield from map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)))
