"""Reads the tensors of a checkpoint directory: safetensors or PyTorch files, single or sharded."""

import io
import json
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from attnlens_model.errors import CheckpointError

_INDEX_SUFFIX = ".index.json"
_MAX_PICKLE_BYTES = 16 * 2**20
# Pickles at the start of a file of PyTorch before 1.6: format, version, platform, tensors, and storage keys.
_LEGACY_PICKLES = 5
_ZIP_START = b"PK\x03\x04"
_LFS_START = b"version https://git-lfs.github.com/spec/"

_Reader = Callable[[], Tensor]


class _Tensors(Mapping[str, Tensor]):
    """Tensors that are read from the file on each access."""

    def __init__(self, readers: Mapping[str, _Reader]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def read_tensors(directory: Path) -> Mapping[str, Tensor]:
    """Return all tensors of a checkpoint by name, memory-mapped if possible.

    Tensors of a safetensors file are read on access and use memory only while they are referenced. Reads the
    first existing file of `model.safetensors`, `model.safetensors.index.json`, `pytorch_model.bin` and
    `pytorch_model.bin.index.json`.

    Raises:
        CheckpointError: No file exists, a shard is missing, or a file is damaged or contains objects other
            than tensors.
    """
    readers = {"model.safetensors": _read_safetensors, "pytorch_model.bin": _read_pickle}
    for name, read in readers.items():
        if (directory / name).is_file():
            return _Tensors(read(directory / name))
        index = directory / (name + _INDEX_SUFFIX)
        if index.is_file():
            return _Tensors(_read_shards(index, read))
    layouts = ", ".join(f"{name}, {name}{_INDEX_SUFFIX}" for name in readers)
    raise CheckpointError(f"{directory} contains no weights: none of {layouts} exists")


def _read_shards(index: Path, read: Callable[[Path], dict[str, _Reader]]) -> dict[str, _Reader]:
    weight_map = _weight_map(index)
    tensors: dict[str, _Reader] = {}
    for shard in sorted(set(weight_map.values())):
        # Shards are in the directory of the index. Reject paths, which could refer to files outside the
        # checkpoint.
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names the shard {shard!r}: it must be a plain file name")
        if not (index.parent / shard).is_file():
            raise CheckpointError(
                f"{index.parent / shard} is missing, although {index.name} lists it: download it"
            )
        stored = read(index.parent / shard)
        # If several shards contain a tensor, the index selects one.
        tensors |= {name: tensor for name, tensor in stored.items() if weight_map.get(name, shard) == shard}
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{index} lists {absent[0]!r}, but {weight_map[absent[0]]} does not contain it: download both"
        )
    return tensors


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not an index of shards: it must be JSON with a weight_map"
        ) from error


def _read_safetensors(path: Path) -> dict[str, _Reader]:
    check_not_lfs_pointer(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: partial(_read_one, path, name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    # Damaged or unusual files may raise any exception, such as KeyError or RuntimeError.
    except Exception as error:
        raise _damage(path, error) from error


def _read_one(path: Path, name: str) -> Tensor:
    # Open the file for each tensor: memory-mapped pages stay resident until the mapping is closed.
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    # As above, for example for a dtype that this version of torch does not support.
    except Exception as error:
        raise _damage(path, error) from error
    return tensor


def _read_pickle(path: Path) -> dict[str, _Reader]:
    check_not_lfs_pointer(path)
    # Only the zip format, the default since torch 1.6, can be mapped.
    is_zip = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        if not is_zip and file.read(len(_ZIP_START)) == _ZIP_START:
            raise CheckpointError(f"{path} is damaged: it is truncated; download it again")
    try:
        _check_sizes(path, is_zip=is_zip)
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is damaged or contains objects other than tensors, and loading it could run code: "
            "convert it to model.safetensors"
        ) from error
    except CheckpointError:
        raise
    # Unpickling a damaged file may raise any exception.
    except Exception as error:
        raise _damage(path, error) from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{path} is not a dict of tensors: save the model's state_dict()")
    return {name: partial(_identity, tensor) for name, tensor in tensors.items()}


def _check_sizes(path: Path, *, is_zip: bool) -> None:
    """Reject files that are much larger in memory: compressed archives, and pickles that allocate bytes.

    PyTorch writes neither, but reads both, even with `weights_only`.
    """
    if not is_zip:
        with path.open("rb") as file:
            _check_pickles(path, file.read(_MAX_PICKLE_BYTES), _LEGACY_PICKLES)
        return
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if is_compressed or sum(member.file_size for member in members) > path.stat().st_size:
            raise CheckpointError(f"{path} is compressed: save it with torch.save, or as model.safetensors")
        for member in members:
            if member.filename.endswith(".pkl"):
                with archive.open(member) as file:
                    _check_pickles(path, file.read(_MAX_PICKLE_BYTES), 1)


def _check_pickles(path: Path, content: bytes, count: int) -> None:
    """Check that the first pickles in `content` only call functions of PyTorch."""
    stream = io.BytesIO(content)
    for _ in range(count):
        for opcode, argument, _position in pickletools.genops(stream):
            name = str(argument)
            if opcode.name == "GLOBAL" and not name.startswith(("torch", "collections ")):
                raise pickle.UnpicklingError(f"{path.name} refers to {name}")


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def check_not_lfs_pointer(path: Path) -> None:
    """Reject a file that `git clone` left as a pointer because Git LFS was not installed.

    Raises:
        CheckpointError: The file is a Git LFS pointer.
    """
    with path.open("rb") as file:
        is_pointer = file.read(len(_LFS_START)) == _LFS_START
    if is_pointer:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in {path.parent}"
        )


def _damage(path: Path, error: Exception) -> CheckpointError:
    """Return an error with the first line of the exception's message, or its type."""
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return CheckpointError(f"{path} is damaged: {reason}; download it again")
