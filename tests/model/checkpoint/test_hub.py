"""Checkpoints by hub id: the network is played by a function, the cache is a real one."""

import functools
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import BertConfig, BertModel

from attnlens_model import CheckpointError, load_checkpoint
from attnlens_model.checkpoint import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class RemoteProtocolError(Exception):
    """Like the exception of httpx, which is not an OSError."""


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Files of the repository org/name: weights in both formats, and others."""
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 8}
    model: Any = BertModel(BertConfig(**sizes))
    directory = tmp_path / "published"
    model.save_pretrained(directory)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    for name in ("tokenizer.json", "vocab.txt", "1_Pooling/config.json", "tf_model.h5", "onnx/model.onnx"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    return directory


@pytest.fixture
def fetched(tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Download directory of the fake Hub."""
    destination = tmp_path / "fetched"

    def play(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repo_id, revision) == ("org/name", "v1")
        names = [str(path.relative_to(published)) for path in published.rglob("*") if path.is_file()]
        wanted = [name for name in names if any(fnmatch(name, pattern) for pattern in allow_patterns)]
        for name in wanted:
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(published / name, destination / name)
        return str(destination)

    monkeypatch.setattr(hub, "snapshot_download", play)
    return destination


def files_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_hub_id_is_fetched_with_its_tokenizer_and_without_duplicate_weights(fetched: Path) -> None:
    checkpoint = load_checkpoint("org/name", revision="v1")
    assert checkpoint.source == "org/name"
    assert checkpoint.directory == fetched
    described = {"config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"}
    assert files_under(fetched) == described | {"model.safetensors"}


def test_pickled_weights_are_fetched_where_there_is_nothing_better(fetched: Path, published: Path) -> None:
    (published / "model.safetensors").unlink()
    assert load_checkpoint("org/name", revision="v1").config.hidden_size == 8
    assert "pytorch_model.bin" in files_under(fetched)


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_weights_of_dense_layers_are_fetched_once(
    has_safetensors: bool, fetched: Path, published: Path
) -> None:
    for name in ("2_Dense/config.json", "2_Dense/pytorch_model.bin", "checkpoint-5/model.safetensors"):
        (published / name).parent.mkdir(exist_ok=True)
        (published / name).write_text("{}")
    if has_safetensors:
        (published / "2_Dense" / "model.safetensors").write_text("")
    load_checkpoint("org/name", revision="v1")
    weights = {name for name in files_under(fetched) if not name.endswith((".json", ".txt"))}
    chosen = "2_Dense/model.safetensors" if has_safetensors else "2_Dense/pytorch_model.bin"
    assert weights == {"model.safetensors", chosen}


def test_cached_checkpoint_needs_no_network(
    tmp_path: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "cache" / "models--org--name"
    shutil.copytree(published, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    offline = functools.partial(snapshot_download, cache_dir=tmp_path / "cache", local_files_only=True)
    monkeypatch.setattr(hub, "snapshot_download", offline)
    checkpoint = load_checkpoint("org/name")
    assert checkpoint.directory == repository / "snapshots" / COMMIT
    assert checkpoint.commit == COMMIT
    assert load_checkpoint(checkpoint.directory).commit == ""  # a directory may have been changed since
    with pytest.raises(
        CheckpointError, match=r"the model org/name at revision 'v2' is neither in the cache of"
    ):
        load_checkpoint("org/name", revision="v2")
    with pytest.raises(CheckpointError, match=r"there is no directory org/other, and the model org/other is"):
        load_checkpoint("org/other")


def http_error(kind: Any) -> Exception:
    """An error of the hub, whose message is a paragraph of the library's own."""
    response = SimpleNamespace(headers={}, request=None)
    error: Exception = kind("404 Client Error. Please try again..", response=response)
    return error


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            LocalEntryNotFoundError("try again.."),
            r"nor could it be downloaded \(LocalEntryNotFoundError\): check the",
        ),
        (ConnectionError("reset"), r"\(ConnectionError\): check the network connection"),
        (
            HFValidationError("bad id"),
            r"'org/name' is neither a directory nor a valid hub id: check the spelling",
        ),
        (
            RemoteProtocolError("peer closed"),
            r"did not provide org/name at revision 'v1' \(RemoteProtocolError\)",
        ),
        (
            json.JSONDecodeError("Expecting value", "<html>", 0),
            r"\(JSONDecodeError\): try again later, or specify a",
        ),
        (
            http_error(RepositoryNotFoundError),
            r"Hub has no public model org/name, .*: check the spelling, or set",
        ),
        (
            http_error(GatedRepoError),
            r"access to org/name is restricted: accept the terms on its model page, and set",
        ),
        (
            http_error(RevisionNotFoundError),
            r"org/name has no revision 'v1': specify an existing branch, tag or commit",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failure_of_the_hub_is_one_sentence_with_one_remedy(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint("org/name", revision="v1")
    assert str(failure) not in str(caught.value)
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize("source", ["./absent", "/absent/dir", "a/b/c", "../x", Path("org/name")])
def test_invalid_source_is_rejected_without_contacting_the_hub(
    source: str | Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(hub, "snapshot_download")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        load_checkpoint(source)


def test_file_is_rejected_with_a_hint(published: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file: specify the directory that contains it"):
        load_checkpoint(published / "model.safetensors")
