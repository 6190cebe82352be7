"""Staging: of an untrusted checkpoint, only regular files of a limited size are read, and no code is run."""

import contextlib
import os
import pickle
import re
import shutil
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from attnlens_model import CheckpointError, CodeHook, load_checkpoint, open_checkpoint
from attnlens_model.checkpoint import staging
from odd_models import OddModel
from small_bundles import TOKENIZERS
from small_files import read, write, write_pooling_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OUTSIDE = Path("/etc/passwd")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    OddModel("Bert", {"num_hidden_layers": 1}).make().save_pretrained(directory)
    shutil.copytree(TOKENIZERS / "wordpiece", directory, dirs_exist_ok=True)
    write_pooling_files(directory, 96)
    for name in ("README.md", "LICENSE.txt"):
        (directory / name).write_text("Text.")
    return directory


@pytest.fixture
def checkpoint(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "checkpoint"))


def files_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def stage(directory: Path) -> set[str]:
    with open_checkpoint(directory) as opened:
        return files_under(opened.directory)


def test_description_and_weights_are_staged_and_other_files_are_not(checkpoint: Path) -> None:
    expected = files_under(checkpoint)
    for name in ("modeling.py", "model.onnx", "onnx/model.onnx", "checkpoint-5/optimizer.bin", ".git/config"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).touch()
    os.mkfifo(checkpoint / "notify")
    (checkpoint / "loop").symlink_to(checkpoint)
    (checkpoint / "data.json").symlink_to(OUTSIDE)
    with (checkpoint / "trainer_state.json").open("wb") as file:
        file.truncate(10**10)
    with open_checkpoint(checkpoint) as opened:
        assert files_under(opened.directory) == expected
        assert (opened.origin, opened.name, opened.commit, opened.code) == (checkpoint, "checkpoint", "", ())
        assert (opened.directory / "model.safetensors").is_symlink()
    assert not opened.directory.exists()


def test_snapshot_of_the_hub_consists_of_links_to_its_blobs(published: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    shutil.copytree(published, snapshot)
    (repository / "blobs").mkdir()
    for number, name in enumerate(sorted(files_under(snapshot))):
        (snapshot / name).rename(repository / "blobs" / str(number))
        (snapshot / name).symlink_to(
            os.path.relpath(repository / "blobs" / str(number), (snapshot / name).parent)
        )
    assert stage(snapshot) == files_under(published)
    assert load_checkpoint(snapshot).directory == snapshot
    (repository / "other").write_text("{}")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(repository / "other")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        stage(snapshot)


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "modules.json", "tokenizer.json", "vocab.txt", "README.md", "LICENSE.txt"),
        *("model.safetensors", "1_Pooling/config.json", "sentence_xlm-roberta_config.json"),
    ],
)
@pytest.mark.parametrize("kind", ["link", "pipe", "device", "loop"])
def test_file_that_is_not_a_regular_one_of_the_checkpoint_is_rejected(
    name: str, kind: str, checkpoint: Path
) -> None:
    path = checkpoint / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": OUTSIDE, "device": Path("/dev/zero"), "loop": path}[kind])
    message = {"link": "is a link to /etc/passwd, outside of the", "loop": "is a broken link"}
    with pytest.raises(CheckpointError, match=f"{name} {message.get(kind, 'is not a regular file')}"):
        load_checkpoint(checkpoint)


def test_link_inside_of_the_checkpoint_is_a_copy(checkpoint: Path) -> None:
    (checkpoint / "LICENSE.txt").unlink()
    (checkpoint / "LICENSE.txt").symlink_to("README.md")
    with open_checkpoint(checkpoint) as opened:
        assert (opened.directory / "LICENSE.txt").read_text() == "Text."
        assert not (opened.directory / "LICENSE.txt").is_symlink()


def test_directory_of_a_module_that_leaves_the_checkpoint_is_rejected(
    checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / "1_Pooling").rename(tmp_path / "pooling")
    (checkpoint / "1_Pooling").symlink_to(tmp_path / "pooling")
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json is a link to .*outside of the checkp"):
        stage(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "README.md", "1_Pooling/config.json"])
def test_huge_file_is_rejected_without_reading_it(name: str, checkpoint: Path) -> None:
    with (checkpoint / name).open("wb") as file:
        file.truncate(10**10)
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(
            CheckpointError, match=f"{name} is larger than (16|64) MiB, the limit of this kind"
        ):
            stage(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 10


def test_number_and_total_size_of_files_are_limited(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MAX_COPIED_BYTES", 2000)
    with pytest.raises(CheckpointError, match="without weights, are larger than 0 MiB"):
        stage(checkpoint)
    monkeypatch.undo()
    monkeypatch.setattr(staging, "MAX_ENTRIES", 3)
    with pytest.raises(CheckpointError, match="contains more than 3 files"):
        stage(checkpoint)


@pytest.mark.parametrize(
    "path", ["../outside", "1_Pooling/../../outside", "/etc", "a\0b", "a" * 300, "\ud800"]
)
def test_path_of_a_module_outside_of_the_checkpoint_is_rejected(path: str, checkpoint: Path) -> None:
    modules = read(checkpoint / "modules.json")
    modules[1]["path"] = path
    write(checkpoint / "modules.json", modules)
    with pytest.raises(
        CheckpointError, match=r"modules\.json names the path .*, which is not inside the check"
    ):
        stage(checkpoint)


@pytest.mark.parametrize("path", ["", ".", "./", "missing", "vocab.txt", 5, None])
def test_path_without_files_is_left_to_its_reader(path: object, checkpoint: Path) -> None:
    modules = read(checkpoint / "modules.json")
    modules[1]["path"] = path
    write(checkpoint / "modules.json", [*modules, "text"])
    assert stage(checkpoint) == files_under(checkpoint) - {"1_Pooling/config.json"}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a": "../b"}}, r"names the shard '\.\./b'"),
        ("pytorch_model.bin.index.json", {"weight_map": {"a": "/etc/passwd"}}, "names the shard '/etc/pas"),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["../tokenizer.9.json"]}, "names the tokenizer '"),
    ],
)
def test_file_name_outside_of_the_checkpoint_is_rejected(
    file: str, content: object, message: str, checkpoint: Path
) -> None:
    write(checkpoint / file, content)
    with pytest.raises(CheckpointError, match=message):
        stage(checkpoint)


def test_errors_name_the_original_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"short")
    with pytest.raises(
        CheckpointError, match=f"^{re.escape(str(checkpoint / 'model.safetensors'))} is damaged"
    ):
        load_checkpoint(checkpoint)


class _Marker:
    """Pickles as a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._path),)


def _add_code(directory: Path, marker: Path) -> None:
    """Add the publisher's code in each place in which a library looks for it."""
    own = f"import os\nos.makedirs({str(marker)!r}, exist_ok=True)\nclass Own:\n    pass\n"
    for name in ("own.py", "1_Pooling/own.py", "2_Dense/own.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(own)
    for name in ("config.json", "tokenizer_config.json"):
        kinds = ("AutoConfig", "AutoModel", "AutoTokenizer")
        write(directory / name, read(directory / name) | {"auto_map": dict.fromkeys(kinds, "own.Own")})
    modules = read(directory / "modules.json")
    modules[0]["type"] = "own.Own"
    modules.append({"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    write(directory / "modules.json", modules)
    write(directory / "2_Dense" / "config.json", {"activation_function": "own.Own", "in_features": 96})
    write(directory / "config_sentence_transformers.json", {"activation_fn": "own.Own"})
    with (directory / "2_Dense" / "pytorch_model.bin").open("wb") as file:
        pickle.dump({"linear.weight": _Marker(marker)}, file)


def test_code_is_found_and_never_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.chdir(checkpoint)  # a library might import from the working directory
    _add_code(checkpoint, marker)
    loaders: list[Callable[[Path], Any]] = [
        load_checkpoint,
        AutoModel.from_pretrained,
        AutoTokenizer.from_pretrained,
        lambda directory: SentenceTransformer(str(directory), device="cpu"),
    ]
    with open_checkpoint(checkpoint) as opened:
        assert set(opened.code) == {
            CodeHook("config.json", "auto_map", ""),
            CodeHook("tokenizer_config.json", "auto_map", ""),
            CodeHook("modules.json", "type", "own.Own"),
            CodeHook("2_Dense/config.json", "activation_function", "own.Own"),
            CodeHook("config_sentence_transformers.json", "activation_fn", "own.Own"),
        }
        assert not [name for name in files_under(opened.directory) if name.endswith(".py")]
        for load in loaders:
            with contextlib.suppress(Exception):  # without the code, some of them fail
                load(opened.directory)
            assert not marker.exists()
    assert load_checkpoint(checkpoint).has_own_code
    assert not marker.exists()


def test_classes_of_the_libraries_are_no_code(checkpoint: Path) -> None:
    names = {"activation_function": "torch.nn.modules.activation.Tanh", "hidden_act": "gelu"}
    write(checkpoint / "config.json", read(checkpoint / "config.json") | names | {"auto_map": {}})
    with open_checkpoint(checkpoint) as opened:
        assert opened.code == ()


def _archive(path: Path, pickled: bytes | None, compression: int) -> None:
    """Write tensors as torch.save does, with another pickle or compression."""
    torch.save({"a": torch.zeros(10**6)}, path.with_suffix(".original"))
    with (
        zipfile.ZipFile(path.with_suffix(".original")) as original,
        zipfile.ZipFile(path, "w", compression) as archive,
    ):
        for member in original.infolist():
            content = original.read(member)
            is_pickle = member.filename.endswith("data.pkl")
            archive.writestr(member.filename, pickled if is_pickle and pickled is not None else content)


class _Bytes:
    def __reduce__(self) -> tuple[type, tuple[int]]:
        return bytearray, (10**9,)


@pytest.mark.parametrize("kind", ["compressed", "bytes", "bytes in a file of PyTorch 1.5"])
def test_pickled_file_that_is_larger_in_memory_is_rejected(kind: str, checkpoint: Path) -> None:
    path = checkpoint / "pytorch_model.bin"
    (checkpoint / "model.safetensors").unlink()
    large = pickle.dumps({"a": [_Bytes()] * 4}, 2)
    if kind == "compressed":
        _archive(path, None, zipfile.ZIP_DEFLATED)
    elif kind == "bytes":
        _archive(path, large, zipfile.ZIP_STORED)
    else:
        torch.save({}, path, _use_new_zipfile_serialization=False)
        start = path.read_bytes()
        path.write_bytes(start.replace(pickle.dumps({}, 2), large, 1))
    tracemalloc.start()
    try:
        with pytest.raises(
            CheckpointError, match="is compressed" if kind == "compressed" else "contains objects"
        ):
            load_checkpoint(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
