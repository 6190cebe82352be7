"""Output files are complete or absent, even with concurrent writers."""

import os
import stat
from pathlib import Path

import pytest

from attnlens_cli.files.output_file import replacing


def test_two_processes_with_the_same_id_write_the_same_file(tmp_path: Path) -> None:
    """This happens if two containers share a volume."""
    path = tmp_path / "vectors.npy"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_process_are_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "vectors.npy"
    left = tmp_path / f".{path.name}.{os.getpid()}.partial"
    left.write_bytes(b"half")
    with replacing(path) as file:
        file.write(b"whole")
    assert (path.read_bytes(), left.read_bytes()) == (b"whole", b"half")


def test_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        with replacing(tmp_path / "page.html"):
            pass
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o640


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def write_half() -> None:
        with replacing(tmp_path / "page.html") as file:
            file.write(b"half")
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        write_half()
    assert list(tmp_path.iterdir()) == []
