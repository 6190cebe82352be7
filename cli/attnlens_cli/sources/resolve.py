"""From SOURCE to a bundle: the one that it is, the one in the cache, or one that is exported now."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import click

from attnlens_cli.frame.extras import how_to_install
from attnlens_cli.frame.failures import REPORTED_COMMAND
from attnlens_cli.frame.stopping import parent_variable, stopped_by_signals
from attnlens_cli.show.printable import printable
from attnlens_cli.sources.cache import Entry, default_directory, entry_of, wanted
from attnlens_cli.sources.source import Checkpoint, find_source

_NEEDED = ("torch", "onnx", "onnxscript", "onnx_ir", "huggingface_hub", "safetensors", "tokenizers")


def resolve(source: Path, cache: Path | None, precision: str) -> Path:
    """Return the directory of a bundle, exporting a checkpoint into the cache if it must be.

    The export runs in a process of its own, so that this one never holds PyTorch. What happens is said on
    stderr.

    Raises:
        click.ClickException: SOURCE is neither, the extra `export` is missing, or the cache can't be written.
        click.exceptions.Exit: the export failed, and has said why.
    """
    found = find_source(source)
    if isinstance(found, Path):
        return found
    entry = entry_of(cache or default_directory(), wanted(found, precision))
    if entry.reason_to_export():
        _check_installed(found)
        with stopped_by_signals(), entry.locked() as lock:
            reason = entry.reason_to_export()  # again: another process may have exported it meanwhile
            if reason:
                _export(found, entry, reason, lock)
    else:
        click.echo(f"{printable(found.name)} is in the cache: {printable(str(entry.directory))}", err=True)
    return entry.directory


def without_options() -> dict[str, str]:
    """Return the environment for a child: what is set for the user's own commands must not change ours."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("ATTNLENS_") or key == "ATTNLENS_DEBUG"
    }


def _check_installed(checkpoint: Checkpoint) -> None:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"{checkpoint.name} is a checkpoint, and to make a bundle of it {missing[0]} must be installed: "
            f"{how_to_install('export,server')}; or export it elsewhere, and give the bundle"
        )


def _export(checkpoint: Checkpoint, entry: Entry, reason: str, lock: int) -> None:
    """Export in a child, which keeps the lock until it has ended, even if this process is killed."""
    click.echo(
        f"exporting {printable(checkpoint.name)} into {printable(str(entry.directory))}, as "
        f"{printable(reason)}; this takes a minute for a small model, and happens once",
        err=True,
    )
    if kept := entry.clear():
        click.echo(f"kept what was there as {printable(str(kept))}", err=True)
    started = time.monotonic()
    options = ["--output", str(entry.directory), "--precision", entry.wanted.precision, "--force"]
    if checkpoint.revision is not None:
        options += ["--revision", checkpoint.revision]
    child = subprocess.Popen(  # noqa: S603 - our own program; no shell reads the arguments
        [sys.executable, "-P", "-m", "attnlens_cli.main", "export", *options, "--", checkpoint.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # of this process it is for the ready line
        env=without_options()
        | parent_variable()
        | {REPORTED_COMMAND: click.get_current_context().command_path},
        pass_fds=[lock],
        start_new_session=True,  # Ctrl-C comes here alone, and the child is told once
    )
    try:
        code = _exit_code(child)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if code:
        raise ended(f"the export of {checkpoint.name}", code)
    entry.record()
    click.echo(f"exported in {time.monotonic() - started:.0f} s", err=True)


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child; in steps, since a signal just before an endless wait would not end it."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=1)


def ended(what: str, code: int) -> Exception:
    """Return how a command ends whose child, `what`, has ended with `code`."""
    if code < 0:
        return click.ClickException(f"{what} was killed by signal {-code}; 9 often means that memory ran out")
    return click.exceptions.Exit(code)  # the child has said why
