"""Which tensor of a checkpoint goes where in the encoder, and everything that does not fit, by name."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens_model.config import EncoderConfig
from attnlens_model.errors import CheckpointError
from attnlens_model.family import Buffer, Family, Layout, RowOrder

# Of each kind of misfit so many are named; the rest is a count.
_MAX_NAMED = 10

# What may be cast to fp32 without changing its meaning; anything else is quantised or no weight at all.
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class FittedTensors(NamedTuple):
    """What `fit_tensors` returns."""

    parameters: dict[str, Tensor]
    """Our parameter names -> fp32 tensors, copies of the checkpoint's."""
    unused: tuple[str, ...]
    """The checkpoint's tensors that do not belong to the encoder."""


def fit_tensors(
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    family: Family,
    config: EncoderConfig,
) -> FittedTensors:
    """Find the tensor for every parameter.

    Args:
        tensors: the checkpoint's, by its own names.
        parameters: the encoder's, by our names; only their shapes are looked at.
        family: how the checkpoint names things.
        config: The encoder.

    Raises:
        CheckpointError: tensors are missing, unexpected, misshapen, of a dtype that weights do not have, or
            hold a NaN or an infinity; a tensor is stored under two names with different values, or a
            stored buffer differs from the one that the encoder computes.
    """
    layout, prefix = _find_layout(tensors, family)
    originals, duplicates = _modern_names(tensors, family)
    _check_duplicates(tensors, duplicates)
    num_layers = config.num_distinct_layers
    buffers = {prefix + name: holds for name, holds in family.named_buffers(num_layers).items()}
    _check_buffers(tensors, {originals[name]: buffers[name] for name in buffers.keys() & originals}, config)
    wanted = {
        prefix + theirs: {name: parameters[name].shape for name in ours}
        for ours, theirs in layout.weight_names(num_layers, parameters)
        if all(name in parameters for name in ours)
    }
    _check_all_named(parameters, wanted.values(), family)
    others = [name for name in originals if name not in {*wanted, *buffers}]
    roots = tuple(prefix + root for root in layout.roots)
    spare = {
        prefix + theirs
        for ours, theirs in layout.weight_names(num_layers, parameters)
        if any(part in ours[0] for part in family.spare)
    }
    places = {originals[name]: _stacked(shapes) for name, shapes in wanted.items() if name in originals}
    _raise_misfits(
        missing=[name for name in wanted if name not in originals],
        unexpected=[originals[name] for name in others if name.startswith(roots) and name not in spare],
        misshapen=_misshapen(tensors, places),
    )
    fitted: dict[str, Tensor] = {}
    broken = []
    for name, shapes in wanted.items():
        split = _split(tensors[originals[name]], shapes, layout.row_order(name), config.num_heads)
        parts = {ours: family.transformed(ours, part) for ours, part in split.items()}
        # After the cast, which makes an infinity of a large float64.
        if not all(_is_finite(part) for part in parts.values()):
            broken.append(originals[name])
        fitted |= parts
    if broken:
        raise CheckpointError(
            f"{_names(broken)}: a NaN or an infinity is among the weights; the checkpoint is damaged or was "
            "never usable: fetch it again"
        )
    return FittedTensors(fitted, tuple(originals[name] for name in others))


def _check_all_named(parameters: Iterable[str], wanted: Iterable[Iterable[str]], family: Family) -> None:
    named = {name for names in wanted for name in names}
    nameless = [name for name in parameters if name not in named]
    if nameless:
        raise CheckpointError(
            f"the weights do not fit config.json; it asks for {_names(nameless)}, and the "
            f"{family.name} family's checkpoints of this layout have no such tensors; check that both belong "
            "together"
        )


def _stacked(shapes: Mapping[str, torch.Size]) -> tuple[int, ...]:
    """Return the shape of the one tensor that holds parameters of these shapes along its first axis."""
    return (sum(shape[0] for shape in shapes.values()), *next(iter(shapes.values()))[1:])


def _split(
    tensor: Tensor, shapes: Mapping[str, torch.Size], order: RowOrder | None, num_heads: int
) -> dict[str, Tensor]:
    """Return the parameters of a tensor, in fp32."""
    sizes = [shape[0] for shape in shapes.values()]
    if order is not None:
        # Looked up by a list of rows, each part is a copy.
        rows = torch.split(order(num_heads, torch.arange(tensor.shape[0])), sizes)
        return {name: tensor[part].to(torch.float32) for name, part in zip(shapes, rows, strict=True)}
    parts = torch.split(tensor, sizes)
    # A copy even of fp32: the encoder must not change with the file that the tensors are mapped from.
    return {
        name: part.to(torch.float32, copy=True).contiguous() for name, part in zip(shapes, parts, strict=True)
    }


def _is_finite(tensor: Tensor) -> bool:
    # Of a NaN both bounds are NaN. `isfinite` would make a second tensor of the same size.
    return all(bool(bound.isfinite()) for bound in tensor.aminmax())


def _find_layout(names: Iterable[str], family: Family) -> tuple[Layout, str]:
    """Return the first layout of which the checkpoint has the anchor, and the prefix."""
    names = set(names)
    for layout in family.layouts:
        found = [prefix for prefix in family.prefixes if prefix + layout.anchor in names]
        if len(found) > 1:
            raise CheckpointError(
                f"more than one encoder: tensors under each of {found}; keep one of them in the checkpoint"
            )
        if found:
            return layout, found[0]
    anchors = ", ".join(prefix + layout.anchor for layout in family.layouts for prefix in family.prefixes)
    raise CheckpointError(
        f"no weights of the {family.name} family: none of {anchors} is among the {len(names)} tensors; "
        "check that config.json and the weights belong together"
    )


def _modern_names(names: Iterable[str], family: Family) -> tuple[dict[str, str], dict[str, str]]:
    """Return {today's name: name in the checkpoint}, and {another name in the checkpoint: that name}."""
    originals: dict[str, str] = {}
    firsts = {name: originals.setdefault(family.modern_name(name), name) for name in names}
    return originals, {name: first for name, first in firsts.items() if name != first}


def _check_duplicates(tensors: Mapping[str, Tensor], duplicates: Mapping[str, str]) -> None:
    for name, first in duplicates.items():
        one, other = tensors[first], tensors[name]
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise CheckpointError(
                f"{first} and {name} are two names of one tensor, and their values differ: remove the one "
                "that the model was not trained with"
            )


def _check_buffers(
    tensors: Mapping[str, Tensor], buffers: Mapping[str, Buffer], config: EncoderConfig
) -> None:
    for name, holds in buffers.items():
        if not holds(config.sizes, config.layer_attentions[0], tensors[name]):
            raise CheckpointError(
                f"{name} differs from the values that follow from config.json, which the encoder computes "
                "instead of reading them: check that config.json and the weights belong together"
            )


def _misshapen(tensors: Mapping[str, Tensor], places: Mapping[str, tuple[int, ...]]) -> list[str]:
    found = []
    for name, shape in places.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            found.append(f"{name} {tuple(tensor.shape)} instead of {shape}")
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
