"""A directory that appears complete or not at all."""

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
    """What a directory is to become, and so what it may replace.

    Attributes:
        noun: what to call it.
        recognize: raises BundleError for a directory of another kind.
    """

    noun: str
    recognize: Callable[[Path], object]


# A file of that name is not enough: web applications have one too.
BUNDLE = TargetKind("bundle", read_manifest)


def check_target(output: Path, *, force: bool, kind: TargetKind = BUNDLE) -> None:
    """Refuse a target that must not be replaced.

    Raises:
        OutputError: it exists and is not empty, unless it is of the same kind and `force` is set.
    """
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return
    try:
        kind.recognize(output)
    except BundleError as error:
        raise OutputError(
            f"{output} exists and is no {kind.noun}: choose another directory, or remove it yourself"
        ) from error
    if not force:
        raise OutputError(f"{output} exists: choose another directory, or replace it with --force")


@contextmanager
def staged(output: Path, *, force: bool, kind: TargetKind = BUNDLE) -> Iterator[Path]:
    """Yield an empty directory beside `output` that replaces it on a normal exit and vanishes on any other.

    Raises:
        OutputError: the directory can't be made or written, or `output` may not be replaced (see
            `check_target`).
    """
    # Where a link leads; the link itself stays. Unlike Path.resolve, a loop of links is no error here.
    output = Path(os.path.realpath(output))
    _check_name(output)
    check_target(output, force=force, kind=kind)
    # Hidden, and on the same file system, so that the move is one rename.
    staging = _sibling(output, "partial")
    missing_parents = [parent for parent in output.parents if not os.path.lexists(parent)]
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir()
        except OSError as error:
            raise OutputError(f"{output} can't be made: {error.strerror}") from error
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
            # Ends at the first that is not empty: all of them stay where the bundle was made.
            for parent in missing_parents:
                parent.rmdir()


def _check_name(output: Path) -> None:
    try:
        str(output).encode()
    except UnicodeEncodeError as error:
        raise OutputError(f"{str(output)!r} is not UTF-8: ONNX can't open files there") from error


def _was_writing(staging: Path, error: OSError) -> bool:
    """Tell whether a failure is one of the output; a full disk names no file, a failed copy two."""
    written = error.filename if error.filename2 is None else error.filename2
    return written is None or Path(os.fsdecode(written)).is_relative_to(staging)


def _replace(staging: Path, output: Path, *, force: bool, kind: TargetKind) -> None:
    """Move `staging` to `output`; what was there is at `staging` afterwards, or gone."""
    # Again: the work took a while.
    check_target(output, force=force, kind=kind)
    try:
        if not (output.is_dir() and any(output.iterdir())):
            staging.rename(output)
        elif exchange(staging, output):
            _take_back_unless(kind, staging, output)
        else:
            _replace_in_two_steps(staging, output)
    except OSError as error:
        raise OutputError(f"the {kind.noun} can't be moved to {output}: {error.strerror}") from error


def _take_back_unless(kind: TargetKind, staging: Path, output: Path) -> None:
    """Undo an exchange that took away something else than was looked at.

    Raises:
        OutputError: it did.
    """
    try:
        kind.recognize(staging)
    except BundleError as error:
        exchange(staging, output)
        raise OutputError(f"{output} has just become something that is no {kind.noun}: see to it") from error


def _replace_in_two_steps(staging: Path, output: Path) -> None:
    """Move `output` aside, then `staging` there: for a moment there is nothing."""
    aside = _sibling(output, "replaced")
    try:
        output.rename(aside)
        staging.rename(output)
    finally:
        # However the second move failed, Ctrl-C included: the old one comes back, unless another process
        # has put a new one there.
        if aside.exists() and not output.exists():
            aside.rename(output)
        shutil.rmtree(aside, ignore_errors=True)


def _sibling(output: Path, purpose: str) -> Path:
    return output.with_name(f".{output.name}.{secrets.token_hex(4)}.{purpose}")
