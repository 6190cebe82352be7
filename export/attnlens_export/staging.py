"""Atomic creation of a directory: it appears complete or not at all."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from attnlens.bundle import BundleError, read_manifest
from attnlens_export.errors import OutputError
from attnlens_export.exchange import exchange


@dataclass(frozen=True)
class TargetKind:
    """Kind of a target directory. Only a directory of the same kind may be replaced.

    Attributes:
        noun: Name for messages.
        recognize: Function that raises BundleError for a directory of another kind.
    """

    noun: str
    recognize: Callable[[Path], object]


# Reads the manifest, because web applications have a manifest.json, too.
BUNDLE = TargetKind("bundle", read_manifest)


def check_target(output: Path, *, force: bool, kind: TargetKind = BUNDLE) -> None:
    """Validate that a target may be created or replaced.

    Raises:
        OutputError: The target is not empty, and is of another kind or `force` is not set.
    """
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return
    try:
        kind.recognize(output)
    except BundleError as error:
        raise OutputError(
            f"{output} exists and is not a {kind.noun}: choose another directory, or remove it yourself"
        ) from error
    if not force:
        raise OutputError(f"{output} exists: choose another directory, or replace it with --force")


@contextmanager
def staged(output: Path, *, force: bool, kind: TargetKind = BUNDLE) -> Iterator[Path]:
    """Yield an empty directory that replaces `output` on success and is removed on an exception.

    Raises:
        OutputError: The directory can't be created or written, or `output` must not be replaced (see
            `check_target`).
    """
    # Replaces the target of a symbolic link. Unlike Path.resolve, realpath accepts a loop of links.
    output = Path(os.path.realpath(output))
    _check_name(output)
    check_target(output, force=force, kind=kind)
    # On the same file system, so that a rename suffices.
    staging = _sibling(output, "partial")
    missing_parents = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
        except OSError as error:
            raise OutputError(f"{output} can't be created: {error.strerror}") from error
        try:
            yield staging
        except OSError as error:
            if not _was_writing(staging, error):
                raise
            raise OutputError(f"{output} can't be written: {error.strerror or error}") from error
        _replace(staging, output, force=force, kind=kind)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(OSError):
            # Stops at the first directory that is not empty. After a success, this is the first one.
            for parent in missing_parents:
                parent.rmdir()


def _check_name(output: Path) -> None:
    try:
        str(output).encode()
    except UnicodeEncodeError as error:
        raise OutputError(
            f"{str(output)!r} is not UTF-8, and ONNX can't open such paths: choose another directory"
        ) from error


def _was_writing(staging: Path, error: OSError) -> bool:
    """Return whether an error was caused by writing to `staging`.

    The error of a full disk has no file name, the error of a failed copy has two.
    """
    written = error.filename if error.filename2 is None else error.filename2
    return written is None or Path(os.fsdecode(written)).is_relative_to(staging)


def _replace(staging: Path, output: Path, *, force: bool, kind: TargetKind) -> None:
    """Move `staging` to `output`. Afterwards, a previous directory is at `staging` or removed."""
    # The target may have changed since the first check.
    check_target(output, force=force, kind=kind)
    try:
        if not (output.is_dir() and any(output.iterdir())):
            staging.rename(output)
        elif exchange(staging, output):
            _undo_unless_recognized(kind, staging, output)
        else:
            _replace_in_two_steps(staging, output)
    except OSError as error:
        raise OutputError(f"the {kind.noun} can't be moved to {output}: {error.strerror}") from error


def _undo_unless_recognized(kind: TargetKind, staging: Path, output: Path) -> None:
    """Undo an exchange if the target was replaced by something else after the check.

    Raises:
        OutputError: The exchange was undone.
    """
    try:
        kind.recognize(staging)
    except BundleError as error:
        exchange(staging, output)
        raise OutputError(
            f"another process replaced {output} by something that is not a {kind.noun}: check its content"
        ) from error


def _replace_in_two_steps(staging: Path, output: Path) -> None:
    """Rename `output`, then `staging`. Between the two steps, there is no `output`."""
    aside = _sibling(output, "replaced")
    try:
        output.rename(aside)
        staging.rename(output)
    finally:
        # If the second rename failed or was interrupted, restore the old directory, unless another process
        # has created a new one.
        if aside.exists() and not output.exists():
            aside.rename(output)
        shutil.rmtree(aside, ignore_errors=True)


def _sibling(output: Path, purpose: str) -> Path:
    return output.with_name(f".{output.name}.{secrets.token_hex(4)}.{purpose}")
