"""`attnlens deploy` prints and copies the files of deploy/."""

from pathlib import Path

from click.testing import CliRunner, Result

from attnlens_cli.app import Invocation, attnlens

FOLDER = Path(__file__).parents[3] / "deploy"


def deploy(*words: str) -> Result:
    return CliRunner().invoke(attnlens, ["deploy", *words], obj=Invocation())


def test_files_are_listed_printed_and_copied(tmp_path: Path) -> None:
    names = deploy().stdout.split()
    assert names == sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file())
    for name in names:
        assert deploy(name).stdout == (FOLDER / name).read_text("utf-8")
    copied = tmp_path / "copied"
    assert deploy("--output", str(copied)).exit_code == 0
    assert {path.relative_to(copied) for path in copied.rglob("*") if path.is_file()} == set(map(Path, names))


def test_unknown_file_and_existing_directory_are_rejected(tmp_path: Path) -> None:
    unknown = deploy("attnlens.service").stderr
    assert "no such file attnlens.service" in unknown
    assert "attnlens@.service" in unknown
    assert "exists: remove it" in deploy("--output", str(tmp_path)).stderr
    assert "both given" in deploy("haproxy.cfg", "--output", str(tmp_path)).stderr
