"""Which tensor of a checkpoint goes where in the encoder, and everything that does not fit, by name."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens_model.errors import CheckpointError
from attnlens_model.family import Family

# Of each kind of misfit so many are named; the rest is a count.
_MAX_NAMED = 10

# What may be cast to fp32 without changing its meaning; anything else is quantised or no weight at all.
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class FittedTensors(NamedTuple):
    """What `fit_tensors` returns."""

    parameters: dict[str, Tensor]
    """Our parameter names -> fp32 tensors, copies of the checkpoint's."""
    unused: tuple[str, ...]
    """The checkpoint's tensors that are no part of the encoder."""


def fit_tensors(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], family: Family, num_layers: int
) -> FittedTensors:
    """Find the tensor for every parameter.

    Args:
        tensors: the checkpoint's, by its own names.
        parameters: the encoder's, by our names; only their shapes are looked at.
        family: how the checkpoint names things.
        num_layers: how many layers have weights of their own.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen, of a dtype that is no weight, or hold a
            NaN or an infinity.
    """
    prefix = _find_prefix(tensors, family)
    originals, duplicates = _modern_names(tensors, family)
    wanted = {ours: prefix + theirs for ours, theirs in family.weight_names(num_layers) if ours in parameters}
    known = {*wanted.values(), *(prefix + buffer for buffer in family.buffers)}
    others = [name for name in originals if name not in known]
    roots = tuple(prefix + root for root in family.roots)
    places = {originals[theirs]: parameters[ours] for ours, theirs in wanted.items() if theirs in originals}
    _raise_misfits(
        missing=[theirs for theirs in wanted.values() if theirs not in originals],
        unexpected=duplicates + [originals[name] for name in others if name.startswith(roots)],
        misshapen=_misshapen(tensors, places),
    )
    # A copy even of fp32: the encoder must not change with the file that the tensors are mapped from.
    fitted = {
        ours: tensors[originals[theirs]].to(torch.float32, copy=True).contiguous()
        for ours, theirs in wanted.items()
    }
    # After the cast, which makes an infinity of a large float64.
    broken = [originals[wanted[ours]] for ours, each in fitted.items() if not each.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{_names(broken)}: a NaN or an infinity is among the weights; the checkpoint is damaged or was "
            "never usable: fetch it again"
        )
    return FittedTensors(fitted, tuple(originals[name] for name in others))


def _find_prefix(names: Iterable[str], family: Family) -> str:
    names = set(names)
    found = [prefix for prefix in family.prefixes if prefix + family.anchor in names]
    if len(found) == 1:
        return found[0]
    anchors = ", ".join(prefix + family.anchor for prefix in family.prefixes)
    if not found:
        raise CheckpointError(
            f"no weights of the {family.name} family: none of {anchors} is among the {len(names)} tensors; "
            "check that config.json and the weights belong together"
        )
    raise CheckpointError(
        f"more than one encoder: tensors under each of {found}; keep one of them in the checkpoint"
    )


def _modern_names(names: Iterable[str], family: Family) -> tuple[dict[str, str], list[str]]:
    """Return {today's name: name in the checkpoint}, and the names that say the same thing once more."""
    originals: dict[str, str] = {}
    duplicates = [name for name in names if originals.setdefault(family.modern_name(name), name) != name]
    return originals, duplicates


def _misshapen(tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> list[str]:
    found = []
    for name, parameter in places.items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            found.append(f"{name} {tuple(tensor.shape)} instead of {tuple(parameter.shape)}")
        elif tensor.dtype not in _WEIGHT_DTYPES:
            found.append(f"{name} {tensor.dtype} instead of floating point")
        elif tensor.layout != torch.strided or tensor.is_meta:
            found.append(f"{name} without plain values ({tensor.layout} on {tensor.device})")
    return found


def _raise_misfits(**kinds: list[str]) -> None:
    found = []
    for kind, names in kinds.items():
        if names:
            found.append(f"{len(names)} {kind}: {_names(names)}")
    if found:
        raise CheckpointError(
            f"the weights do not fit config.json; {'; '.join(found)}; check that both belong together"
        )


def _names(names: list[str]) -> str:
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + rest
