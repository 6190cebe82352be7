"""Interface of runtimes: name, installation check, and the command of a process that runs a graph."""

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
"""Inputs by name, int64 or float32, in the order of the graph."""

STORED = {"int64": "<i8", "float32": "<f4"}
"""Data types of inputs in exchanged files."""

Run = Callable[[Feed], Sequence[npt.NDArray[Any]]]
"""Runs an open graph and returns all outputs in the order of the graph."""

FP32 = "fp32"


class Opened(NamedTuple):
    """Graph opened by a runtime."""

    run: Run
    precision: str = FP32
    """Precision reported by the runtime: fp32, bf16 or fp16."""
    processor: str = ""
    """Processor name reported by the runtime."""


class Settings(NamedTuple):
    """Compilation settings of a graph."""

    properties: Mapping[str, str]
    """Properties of the runtime by name."""
    device: str = ""
    """Device name of the runtime, or "" for its default."""


# Option of the worker. Its value is a JSON array of the fields of Settings.
SETTINGS_OPTION = "--settings"
_PACKAGE = "package.json"
NODE_RUNNER = Path(__file__).parent / "node" / "worker.mjs"


class NotInstalledError(Exception):
    """A runtime is not installed. The message contains the installation command."""


@dataclass(frozen=True)
class Installed:
    """Installed runtime.

    Attributes:
        name: Name in the option `--runtime`.
        version: Version of its package.
        command: Command of its process. The graph and the directory of tensors are appended.
        fp32_command: Command with settings for fp32. Empty if the runtime uses fp32 by default.
    """

    name: str
    version: str
    command: tuple[str, ...]
    fp32_command: tuple[str, ...] = ()


class Runtime(Protocol):
    """A runtime, which may not be installed."""

    @property
    def name(self) -> str:
        """Name in the option `--runtime`."""

    def find(self, node_modules: Path | None) -> Installed:
        """Find the installed runtime. npm packages may be in `node_modules`.

        Raises:
            NotInstalledError: The runtime is not installed.
        """


@dataclass(frozen=True)
class PythonRuntime:
    """Runtime that is a Python package.

    Attributes:
        name: Name in the option `--runtime`.
        distributions: PyPI packages that provide the runtime, the recommended one first.
        open_graph: Opens an ONNX file with default settings. Called in the process of the runtime, where it
            imports the runtime.
        also: Additional required packages.
        open_with: Opens an ONNX file with the given settings. None if the runtime has no settings.
        fp32_settings: Settings for fp32. None if the runtime uses fp32 by default.
    """

    name: str
    distributions: tuple[str, ...]
    open_graph: Callable[[Path], Opened]
    also: tuple[str, ...] = ()
    open_with: Callable[[Path, Settings], Opened] | None = None
    fp32_settings: Settings | None = None

    def find(self, node_modules: Path | None) -> Installed:  # noqa: ARG002 - part of the interface
        """Find the installed package."""
        versions = [*filter(None, map(_version_of, self.distributions))]
        if not versions or not all(map(_version_of, self.also)):
            packages = " ".join((self.distributions[0], *self.also))
            raise NotInstalledError(f"{self.name} is not installed: pip install {packages}")
        in_fp32 = self.command(self.fp32_settings) if self.fp32_settings else ()
        return Installed(self.name, versions[0], self.command(), in_fp32)

    def command(self, settings: Settings | None = None) -> tuple[str, ...]:
        """Return the command of a process that opens a graph with settings, or with the defaults if None."""
        # -P prevents files in the working directory from shadowing modules of the runtime.
        command = (sys.executable, "-P", "-m", "attnlens_runtimes.worker", self.name)
        return command if settings is None else (*command, SETTINGS_OPTION, json.dumps(settings))


@dataclass(frozen=True)
class NodeRuntime:
    """Runtime that is an npm package for Node.js. `name` is the package name."""

    name: str

    def find(self, node_modules: Path | None) -> Installed:
        """Find the package in the nearest `node_modules`."""
        node = shutil.which("node")
        if node is None:
            raise NotInstalledError(f"{self.name} needs Node.js: `node` is not on the PATH")
        directories = [node_modules] if node_modules else _node_modules()
        packages = (directory / self.name for directory in directories)
        package = next((each for each in packages if (each / _PACKAGE).is_file()), None)
        if package is None:
            where = (
                str(node_modules)
                if node_modules
                else "node_modules of this directory, its parents and NODE_PATH"
            )
            raise NotInstalledError(
                f"{self.name} is not installed: npm install {self.name} (looked in {where})"
            )
        try:
            version = str(json.loads((package / _PACKAGE).read_text(encoding="utf-8"))["version"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise NotInstalledError(
                f"{package / _PACKAGE} is invalid: npm install {self.name} again ({error})"
            ) from error
        return Installed(self.name, version, (node, str(NODE_RUNNER), str(package.resolve())))


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _node_modules() -> Iterator[Path]:
    """Yield the directories in which Node.js searches for packages, starting with the working directory."""
    here = Path.cwd()
    yield from (directory / "node_modules" for directory in (here, *here.parents))
    yield from map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)))
