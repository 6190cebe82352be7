"""Recognition of SOURCE as a bundle, a checkpoint or a hub id, and messages for anything else."""

import shutil
from pathlib import Path

import click
import pytest

from attnlens_cli.sources.source import Checkpoint, find_source
from stored_bundle import STORED_BUNDLE


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(source: str) -> str:
    with pytest.raises(click.ClickException) as caught:
        find_source(Path(source))
    return caught.value.message


def test_directory_with_a_manifest_is_a_bundle() -> None:
    assert find_source(STORED_BUNDLE) == STORED_BUNDLE  # has a config.json, too


@pytest.mark.parametrize("name", ["config.json", "modules.json", "adapter_config.json"])
def test_directory_with_a_configuration_is_a_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert find_source(tmp_path) == Checkpoint(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("source", "name", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
@pytest.mark.usefixtures("here")
def test_missing_path_that_looks_like_a_hub_id_is_a_hub_id(
    source: str, name: str, revision: str | None
) -> None:
    assert find_source(Path(source)) == Checkpoint(name, revision=revision)


@pytest.mark.parametrize(
    "source", ["minilm", "/no/such/model", "../no/model", "org/name@", "a/b/c", "org/-x"]
)
@pytest.mark.usefixtures("here")
def test_missing_path_that_is_not_a_hub_id_does_not_exist(source: str) -> None:
    assert refusal(source).startswith(f"{source} does not exist: use the directory of a bundle")


def test_misspelled_path_is_not_a_hub_id_and_existing_bundles_are_listed(here: Path) -> None:
    shutil.copytree(STORED_BUNDLE, here / "bundles" / "small")
    assert refusal("bundles/smal").endswith("bundles: the bundles there are bundles/small")
    assert refusal("bundles").endswith("(it has no config.json): the bundles there are bundles/small")


def test_contents_of_an_invalid_directory_are_listed(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)).endswith("it is empty")
    for number in range(7):
        (tmp_path / f"{number}\x1b.txt").touch()
    (tmp_path / "0").mkdir()
    assert refusal(str(tmp_path)) == (
        f"{tmp_path} is not a bundle (it has no manifest.json) and not a checkpoint (it has no config.json): "
        r"it contains 0/, 0\x1b.txt, 1\x1b.txt, 2\x1b.txt, 3\x1b.txt and 3 more"
    )


def test_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.touch()
    assert refusal(str(path)) == f"{path} is a file: use the directory of a bundle or of a checkpoint"


def test_bundle_without_its_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    bundle = shutil.copytree(STORED_BUNDLE, tmp_path / "Bundle")
    (bundle / "manifest.json").unlink()
    assert refusal(str(bundle)).startswith(f"{bundle} looks like a bundle without manifest.json")
    (bundle / "model.safetensors").touch()  # a checkpoint with weights and third-party graphs
    assert find_source(bundle) == Checkpoint(str(bundle), bundle)
