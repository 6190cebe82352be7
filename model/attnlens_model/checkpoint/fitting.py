"""Maps the tensors of a checkpoint to encoder parameters and reports all mismatches by name."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnlens_model.config import EncoderConfig
from attnlens_model.errors import CheckpointError
from attnlens_model.family import Buffer, Family, Layout

# Maximum number of names listed for each kind of mismatch.
_MAX_NAMED = 10

# Dtypes that can be cast to fp32. Other dtypes are quantized or not weights.
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class FittedTensors(NamedTuple):
    """Result of `fit_tensors`."""

    parameters: dict[str, Tensor]
    """fp32 copies of the tensors, by our parameter names."""
    unused: tuple[str, ...]
    """Names of tensors in the checkpoint that do not belong to the encoder."""


def fit_tensors(
    tensors: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    family: Family,
    config: EncoderConfig,
) -> FittedTensors:
    """Return the parameters of an encoder from the tensors of a checkpoint.

    Args:
        tensors: Tensors by the checkpoint's names.
        parameters: Encoder parameters by our names. Only their shapes are used.
        family: Family of the checkpoint.
        config: Configuration of the encoder.

    Raises:
        CheckpointError: A tensor is missing, unexpected, inconsistent with the encoder or with a duplicate,
            or contains NaN or infinite values; or a stored buffer differs from the computed values.
    """
    layout, prefix = _find_layout(tensors, family)
    originals, duplicates = _modern_names(tensors, family)
    _check_duplicates(tensors, duplicates)
    num_layers = config.num_distinct_layers
    buffers = {prefix + name: check for name, check in family.named_buffers(num_layers).items()}
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
    expected_shapes = {
        originals[name]: _stored_shape(shapes, is_transposed=layout.is_transposed(name))
        for name, shapes in wanted.items()
        if name in originals
    }
    _raise_misfits(
        missing=[name for name in wanted if name not in originals],
        unexpected=[originals[name] for name in others if name.startswith(roots) and name not in spare],
        misshapen=_misshapen(tensors, expected_shapes),
    )
    fitted: dict[str, Tensor] = {}
    broken = []
    for name, shapes in wanted.items():
        parts = _split(tensors[originals[name]], shapes, layout, name, config.num_heads)
        # After the cast, in which a large float64 becomes infinite.
        if not all(_is_finite(part) for part in parts.values()):
            broken.append(originals[name])
        fitted |= parts
    _raise_broken(broken)
    return FittedTensors(fitted, tuple(originals[name] for name in others))


def _raise_broken(names: list[str]) -> None:
    if names:
        raise CheckpointError(
            f"{_names(names)}: the weights contain NaN or infinite values; the checkpoint is damaged or was "
            "never usable: download it again"
        )


def _check_all_named(parameters: Iterable[str], wanted: Iterable[Iterable[str]], family: Family) -> None:
    named = {name for names in wanted for name in names}
    nameless = [name for name in parameters if name not in named]
    if nameless:
        raise CheckpointError(
            f"the weights do not match config.json; it requires {_names(nameless)}, but checkpoints of the "
            f"{family.name} family in this layout do not have these tensors; check that both belong together"
        )


def _stored_shape(shapes: Mapping[str, torch.Size], *, is_transposed: bool) -> tuple[int, ...]:
    """Return the shape of the tensor that stores parameters concatenated along the first axis."""
    stacked = (sum(shape[0] for shape in shapes.values()), *next(iter(shapes.values()))[1:])
    return stacked[::-1] if is_transposed else stacked


def _split(
    tensor: Tensor, shapes: Mapping[str, torch.Size], layout: Layout, name: str, num_heads: int
) -> dict[str, Tensor]:
    """Split the tensor `name` into fp32 parameters."""
    sizes = [shape[0] for shape in shapes.values()]
    tensor = tensor.T if layout.is_transposed(name) else tensor
    order = layout.row_order(name)
    if order is not None:
        # Indexing by rows already copies.
        rows = torch.split(order(num_heads, torch.arange(tensor.shape[0])), sizes)
        return {name: tensor[part].to(torch.float32) for name, part in zip(shapes, rows, strict=True)}
    parts = torch.split(tensor, sizes)
    # Copy even fp32 tensors, so that the encoder does not depend on the memory-mapped file.
    return {
        name: part.to(torch.float32, copy=True).contiguous() for name, part in zip(shapes, parts, strict=True)
    }


def _is_finite(tensor: Tensor) -> bool:
    # Both bounds are NaN if a value is NaN. `isfinite` would allocate a tensor of the same size.
    return all(bool(bound.isfinite()) for bound in tensor.aminmax())


def _find_layout(names: Iterable[str], family: Family) -> tuple[Layout, str]:
    """Return the first layout whose anchor is in the checkpoint, and the prefix."""
    names = set(names)
    for layout in family.layouts:
        found = [prefix for prefix in family.prefixes if prefix + layout.anchor in names]
        if len(found) > 1:
            raise CheckpointError(
                f"more than one encoder: found tensors with the prefixes {found}; keep one of them in the "
                "checkpoint"
            )
        if found:
            return layout, found[0]
    anchors = ", ".join(prefix + layout.anchor for layout in family.layouts for prefix in family.prefixes)
    raise CheckpointError(
        f"no weights of the {family.name} family: the {len(names)} tensors include none of {anchors}; "
        "check that config.json and the weights belong together"
    )


def _modern_names(names: Iterable[str], family: Family) -> tuple[dict[str, str], dict[str, str]]:
    """Return {current name: name in the checkpoint} and {duplicate in the checkpoint: first name}."""
    originals: dict[str, str] = {}
    firsts = {name: originals.setdefault(family.modern_name(name), name) for name in names}
    return originals, {name: first for name, first in firsts.items() if name != first}


def _check_duplicates(tensors: Mapping[str, Tensor], duplicates: Mapping[str, str]) -> None:
    for name, first in duplicates.items():
        one, other = tensors[first], tensors[name]
        if one.dtype != other.dtype or not torch.equal(one, other):
            raise CheckpointError(
                f"{first} and {name} are two names of one tensor, but their values differ: remove the tensor "
                "that was not used in training"
            )


def _check_buffers(
    tensors: Mapping[str, Tensor], buffers: Mapping[str, Buffer], config: EncoderConfig
) -> None:
    for name, check in buffers.items():
        if not check(config.sizes, config.layer_attentions[0], tensors[name]):
            raise CheckpointError(
                f"{name} differs from the values computed from config.json: check that config.json and the "
                "weights belong together"
            )


def _misshapen(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    found = []
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            found.append(f"{name} {tuple(tensor.shape)} instead of {shape}")
        elif tensor.dtype not in _WEIGHT_DTYPES:
            found.append(f"{name} {tensor.dtype} instead of floating point")
        elif tensor.layout != torch.strided or tensor.is_meta:
            found.append(f"{name} without dense values ({tensor.layout} on {tensor.device})")
    return found


def _raise_misfits(**kinds: list[str]) -> None:
    found = []
    for kind, names in kinds.items():
        if names:
            found.append(f"{len(names)} {kind}: {_names(names)}")
    if found:
        raise CheckpointError(
            f"the weights do not match config.json; {'; '.join(found)}; check that both belong together"
        )


def _names(names: list[str]) -> str:
    omitted = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + omitted
