"""Release check: `make release-check`.

Builds wheel and sdist from the committed files, installs them in new environments of Python 3.11 to 3.14 with
the oldest and the newest dependencies, and runs them. Writes to dist/: the wheel, the sdist, the licenses of
installed packages, and an SBOM (CycloneDX).

`[export]` is installed with the oldest versions and with those in constraints.txt, because the newest PyTorch
would install CUDA. uv uses local packages if UV_FIND_LINKS is set.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TOOLS = Path(sys.executable).parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# None of them requires users to publish their own code. The Mozilla license requires it for changes to the
# package.
LICENCES = {
    "0BSD",
    "3-Clause BSD License",
    "Apache Software License",
    "Apache Software License 2.0",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD",
    "BSD License",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC-BY-SA-4.0",  # the treebank of `attnlens heads`
    "CC0-1.0",
    "MIT",
    "MIT License",
    "MPL-2.0",
    "PSF-2.0",
    "Zlib",
}
PACKAGES = ("analysis", "bulk", "cli", "client", "export", "model", "server", "viewer")


class NotReleasableError(Exception):
    """The tree cannot be released. The message contains the remedy."""


@dataclass(frozen=True)
class Environment:
    """Virtual environment of one Python version."""

    directory: Path
    python: Path

    def install(self, requirement: str, *options: str) -> None:
        """Install a requirement with uv."""
        run(TOOLS / "uv", "pip", "install", "--quiet", "--python", self.python, *options, requirement)

    def use(self, bundle: Path) -> None:
        """Serve `bundle` with the installed packages, and call the server."""
        run(self.python, ROOT / "release" / "smoke.py", bundle, cwd=self.directory)


def main(bundle: Path) -> None:
    """Run all checks.

    Raises:
        NotReleasableError: something is not as it must be.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with step("the tree is committed"):
            check_committed()
        with step("wheel and sdist"):
            wheel, sdist = build(directory)
        with step("what the wheel holds, and that the README renders"):
            check_contents(wheel)
            run(TOOLS / "twine", "check", "--strict", wheel, sdist)
        for version in PYTHONS:
            for resolution in ("lowest-direct", "highest"):
                with step(f"Python {version}, [http,server], {resolution} dependencies"):
                    environment = new_environment(directory / f"{version}-{resolution}", version)
                    environment.install(f"{wheel}[http,server]", "--resolution", resolution)
                    environment.use(bundle)
        with step("licences and SBOM of [http,server]"):
            report(environment, "server")
        for name, options in {
            "lowest": ("--resolution", "lowest-direct"),
            "constraints": ("--constraint", str(ROOT / "constraints.txt")),
        }.items():
            with step(f"Python {PYTHONS[0]}, [export,server], {name}"):
                environment = new_environment(directory / f"export-{name}", PYTHONS[0])
                environment.install(f"{wheel}[export,server]", *options)
                environment.use(bundle)
                run(environment.python, "-m", "attnlens_cli.main", "check", bundle, cwd=directory)
        with step("licences and SBOM of [export]"):
            report(environment, "export")
    print(f"ready: {', '.join(sorted(path.name for path in DIST.iterdir()))} in {DIST}")


def check_committed() -> None:
    """Reject uncommitted changes."""
    changed = run("git", "status", "--porcelain", cwd=ROOT)
    if changed:
        raise NotReleasableError(f"commit these, or put them away:\n{changed}")


def build(directory: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist from the files of HEAD, and the wheel again from the sdist."""
    source, again = directory / "source", directory / "again"
    source.mkdir()
    run("git", "archive", "--output", directory / "head.tar", "HEAD", cwd=ROOT)
    run("tar", "--extract", "--file", directory / "head.tar", cwd=source)
    shutil.rmtree(DIST, ignore_errors=True)
    run(TOOLS / "python", "-m", "build", "--sdist", "--wheel", "--outdir", DIST, source)
    [wheel], [sdist] = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(TOOLS / "python", "-m", "build", "--wheel", "--outdir", again, unpacked(sdist, directory))
    if contents(wheel) != contents(again / wheel.name):
        raise NotReleasableError(f"the wheel of {sdist.name} is not that of the tree: see [tool.hatch.build]")
    return wheel, sdist


def unpacked(sdist: Path, directory: Path) -> Path:
    """Unpack `sdist` in `directory` and return its root directory."""
    run("tar", "--extract", "--file", sdist, cwd=directory)
    return directory / sdist.name.removesuffix(".tar.gz")


def contents(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file except RECORD."""
    with zipfile.ZipFile(wheel) as opened:
        return {entry.filename: entry.CRC for entry in opened.infolist() if "RECORD" not in entry.filename}


def check_contents(wheel: Path) -> None:
    """Reject a wheel that lacks py.typed files or licenses, or contains other files than packages."""
    names = set(contents(wheel))
    needed = {f"attnlens_{package}/py.typed" for package in PACKAGES} | {"attnlens/py.typed"}
    missing = needed - names
    licences = {name for name in names if ".dist-info/licenses/" in name}
    foreign = {name for name in names if not name.startswith("attnlens")}
    if missing or foreign or len(licences) < 2:  # noqa: PLR2004 - one for the code, one for the treebank
        raise NotReleasableError(f"missing: {missing}; foreign: {foreign}; licences: {licences}")


def new_environment(directory: Path, version: str) -> Environment:
    """Create an environment of an installed Python version."""
    candidates = [shutil.which(f"python{version}") or ""]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += [str(path) for path in pyenv.glob(f"versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", ""], check=False, capture_output=True).returncode == 0:
            run(TOOLS / "uv", "venv", "--quiet", "--python", candidate, directory)
            return Environment(directory, directory / "bin" / "python")
    raise NotReleasableError(f"Python {version} is not installed, and a release is tried on it: install it")


def report(environment: Environment, extra: str) -> None:
    """Write licenses and SBOM of installed packages, and reject unknown licenses."""
    target = ("--python", environment.python, "--from", "mixed")
    for package in json.loads(run(TOOLS / "pip-licenses", *target, "--format", "json")):
        unknown = set(re.split(r" AND | OR |; ", package["License"])) - LICENCES
        if unknown:
            raise NotReleasableError(f"{package['Name']} has a licence that LICENCES lacks: {unknown}")
    licences = DIST / f"licences-{extra}.md"
    run(TOOLS / "pip-licenses", *target, "--format", "markdown", "--with-urls", "--output-file", licences)
    sbom = DIST / f"sbom-{extra}.cdx.json"
    found = json.loads(run(TOOLS / "cyclonedx-py", "environment", environment.python))
    for component in found["components"]:  # remove the local path of the wheel
        references = component.get("externalReferences", [])
        component["externalReferences"] = [ref for ref in references if not ref["url"].startswith("file:")]
    sbom.write_text(json.dumps(found, indent=1), encoding="utf-8")


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a program and return its output.

    Raises:
        NotReleasableError: it failed.
    """
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, check=False, capture_output=True, text=True
    )
    if ended.returncode != 0:
        shown = " ".join(str(part) for part in command)
        raise NotReleasableError(f"{shown}\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")
    return ended.stdout


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print a description of the step and its duration."""
    print(f"{name} ... ", end="", flush=True)
    started = time.monotonic()
    yield
    print(f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve())
    except NotReleasableError as error:
        sys.exit(f"\nnot releasable: {error}")
