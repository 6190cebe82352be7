"""Published weights -> an `Encoder`: find the files, read the tensors, fit each to its place or say why not."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attnlens_model.config import EncoderConfig, read_config
from attnlens_model.encoder import Encoder
from attnlens_model.errors import CheckpointError
from attnlens_model.families import family_named
from attnlens_model.family import Family
from attnlens_model.hub import checkpoint_directory
from attnlens_model.tensor_files import read_tensors

# Of each kind of misfit so many are named; the rest is a count.
_MAX_NAMED = 10

# What may be cast to fp32 without changing its meaning; anything else is quantised or no weight at all.
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Checkpoint:
    """An encoder with published weights, and where it came from.

    Attributes:
        encoder: in eval mode, fp32, on the CPU.
        config: what the encoder was built from.
        directory: where the configuration and tokenizer files are.
        source: the hub id, or the name (never the path) of the directory.
        unused_tensors: names of tensors that are no part of the encoder: pooler and task heads.
    """

    encoder: Encoder
    config: EncoderConfig
    directory: Path
    source: str
    unused_tensors: tuple[str, ...]


def load_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Load a checkpoint from a directory or from the Hugging Face Hub.

    Read are `config.json` and the first of `model.safetensors`, its sharded form, `pytorch_model.bin`, its
    sharded form. Weights in half precision are cast to fp32.

    Args:
        source: a directory, or a hub id such as "sentence-transformers/all-MiniLM-L6-v2".
        revision: branch, tag or commit on the Hub; None is its default branch.

    Raises:
        CheckpointError: not found or unreadable, or tensors are missing, unexpected or misshapen.
        ConfigError: `config.json` describes no encoder that is supported.
    """
    directory, name = checkpoint_directory(source, revision)
    config = read_config(directory / "config.json")
    weights, unused = _fit(read_tensors(directory), config)
    # Without storage at first: the parameters are replaced by the loaded ones, and no random number is drawn.
    with torch.device("meta"):
        encoder = Encoder(config)
    encoder.load_state_dict(weights, assign=True)
    return Checkpoint(encoder.eval(), config, directory, name, unused)


def _fit(tensors: Mapping[str, Tensor], config: EncoderConfig) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return our parameter names -> fp32 tensors, and the names of tensors that the encoder does not use."""
    family = family_named(config.family)
    prefix = _find_prefix(tensors, family)
    by_name: dict[str, str] = {}
    duplicates = []
    for name in tensors:
        modern = family.modern_name(name)
        if modern in by_name:
            duplicates.append(name)
        by_name[modern] = name
    with torch.device("meta"):
        expected = Encoder(config).state_dict()
    places = {
        ours: prefix + theirs for ours, theirs in family.weight_names(config.num_layers) if ours in expected
    }
    buffers = {prefix + buffer for buffer in family.buffers}
    others = [name for name in by_name if name not in set(places.values()) | buffers]
    roots = tuple(prefix + root for root in family.roots)
    unexpected = [by_name[name] for name in others if name.startswith(roots)]
    _raise_misfits(
        missing=[theirs for theirs in places.values() if theirs not in by_name],
        unexpected=unexpected + duplicates,
        misshapen=_misshapen(
            {by_name[theirs]: expected[ours] for ours, theirs in places.items() if theirs in by_name}, tensors
        ),
    )
    # A copy even of fp32: the encoder must not change with the file that the tensors are mapped from.
    weights = {
        ours: tensors[by_name[theirs]].to(torch.float32, copy=True).contiguous()
        for ours, theirs in places.items()
    }
    return weights, tuple(by_name[name] for name in others)


def _find_prefix(names: Iterable[str], family: Family) -> str:
    names = set(names)
    found = [prefix for prefix in family.prefixes if prefix + family.anchor in names]
    if len(found) == 1:
        return found[0]
    wanted = ", ".join(prefix + family.anchor for prefix in family.prefixes)
    if not found:
        raise CheckpointError(
            f"no weights of the {family.name} family: none of {wanted} is among the {len(names)} tensors; "
            "check that config.json and the weights belong together"
        )
    raise CheckpointError(
        f"more than one encoder: tensors under each of {found}; keep one of them in the checkpoint"
    )


def _misshapen(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    found = []
    for name, place in expected.items():
        tensor = tensors[name]
        if tensor.shape != place.shape:
            found.append(f"{name} {tuple(tensor.shape)} instead of {tuple(place.shape)}")
        elif tensor.dtype not in _WEIGHT_DTYPES:
            found.append(f"{name} {tensor.dtype} instead of floating point")
    return found


def _raise_misfits(**kinds: list[str]) -> None:
    lines = []
    for kind, names in kinds.items():
        if names:
            rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            lines.append(f"{len(names)} {kind}: {', '.join(names[:_MAX_NAMED])}{rest}")
    if lines:
        raise CheckpointError(
            "the weights do not fit config.json; " + "; ".join(lines) + "; check that both belong together"
        )
