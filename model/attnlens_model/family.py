"""`Family`: how one family of published encoders names its configuration keys and its tensors.

A family is data: one `FAMILY = Family(...)` in one module of `families`. All families share one encoder,
whose parts `EncoderConfig` selects.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from attnlens_model.attention.mechanism import AttentionConfig, EncoderSizes

# A parameter name, or the names of several parameters that a checkpoint concatenates along the first axis.
Parameters = str | tuple[str, ...]

# Reorders row indices, (rows,) int64, to match our parameters. The first argument is the number of heads.
RowOrder = Callable[[int, Tensor], Tensor]

# Returns whether a stored tensor equals the values that an encoder with this attention in layer 0 computes.
Buffer = Callable[[EncoderSizes, AttentionConfig, Tensor], bool]

COMMON_PREFIXES = ("", "model.", "0.auto_model.")
"""Prefixes of an encoder that was saved alone, inside a task model, and by sentence-transformers."""

QUERY_KEY_VALUE = tuple(f"layers.{{layer}}.attention.{name}" for name in ("query", "key", "value"))
"""The modules of a fused query, key and value projection."""


@dataclass(frozen=True)
class Layout:
    """Tensor names and row orders in one kind of checkpoint.

    Attributes:
        weights: Maps our parameter names to the tensor names in the checkpoint. A tuple of parameters is
            stored as one tensor. `{layer}` is the layer index. `{part}` is the index of a part, such as an
            expert; all parts are stored as one tensor. If empty, the checkpoint uses our names.
        anchor: Tensor name (a value of `weights`) that every such checkpoint contains. Its position in the
            full name determines the prefix.
        roots: Name prefixes of the encoder's tensors. A tensor under a root must be in `weights`; any other
            tensor (pooler, task heads) is ignored and reported.
        row_orders: Maps the end of a tensor name to its row order, for tensors whose rows are ordered
            differently from our parameters.
        transposed: Ends of the names of matrices that are stored as (inputs, outputs) instead of (outputs,
            inputs).
    """

    weights: Mapping[Parameters, str]
    anchor: str
    roots: tuple[str, ...]
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()

    def weight_names(
        self, num_layers: int, parameters: Iterable[str]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield pairs of our parameter names and the checkpoint's tensor name without prefix.

        Args:
            num_layers: Number of layers with their own weights.
            parameters: Parameter names of the encoder.
        """
        known = tuple(parameters)
        if not self.weights:
            yield from (((name,), name) for name in known)
        for stored, theirs in self.weights.items():
            ours = (stored,) if isinstance(stored, str) else stored
            for layer in range(num_layers if "{layer}" in ours[0] else 1):
                names = [name.replace("{layer}", str(layer)) for name in ours]
                if parts := tuple(_expand_parts(names, known)):
                    yield parts, theirs.format(layer=layer)

    def row_order(self, name: str) -> RowOrder | None:
        """Return the row order of the tensor `name`, or None if it matches our parameters."""
        return next((order for ending, order in self.row_orders.items() if name.endswith(ending)), None)

    def is_transposed(self, name: str) -> bool:
        """Return whether the tensor `name` is stored as (inputs, outputs)."""
        return name.endswith(self.transposed)


@dataclass(frozen=True)
class TaskAdapters:
    """Low-rank adapters stored in a checkpoint in addition to its weights.

    Attributes:
        tasks: Task names, in the order in which the checkpoint stacks the adapters.
        scale: Factor of the product of the two adapter matrices.
    """

    tasks: tuple[str, ...]
    scale: float


@dataclass(frozen=True)
class Family:
    """Configuration keys and tensor names of one family of checkpoints.

    Attributes:
        name: Our name of the family, the value of `EncoderConfig.family`.
        model_types: `model_type` values of a Hugging Face `config.json` that select this family.
        architecture: Class name of the encoder in `architectures`.
        read_config: Converts the content of a `config.json` to `EncoderConfig` values by path.
        write_config: Converts `EncoderConfig` values by path to the content of a `config.json`. `attention`
            is the list of the layer pattern; `attention.num_heads` and similar paths describe its first
            entry. The same applies to `feed_forward`.
        weights: Tensor names of the first layout to try. See `Layout`, also for `anchor`, `roots`,
            `row_orders` and `transposed`.
        prefixes: Prefixes that may precede all tensor names. Exactly one must match a checkpoint.
        other_layouts: Additional layouts, for example of checkpoints published with custom code.
        buffers: Tensors under the roots that some files store and the encoder computes. `{layer}` is the
            layer index. A checkpoint with different values is rejected.
        legacy_suffixes: Maps legacy name endings to current ones. A tensor stored under both names must have
            bitwise equal values.
        spare: Substrings of our parameter names that a checkpoint may contain although its configuration
            describes an encoder without these parameters.
        claims: Returns whether a `config.json` belongs to this family when families share a `model_type`. If
            None, the family is the default for its model types.
        read_adapters: Reads the task adapters from a `config.json`. If None, the family has no adapters.
        prepare: Maps the tensors of a checkpoint and the content of its `config.json` to tensors under names
            of `weights`, for families whose names depend on the user. If None, names are not changed.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    read_config: Callable[[Mapping[str, object]], dict[str, object]]
    write_config: Callable[[Mapping[str, object]], dict[str, object]]
    weights: Mapping[Parameters, str]
    prefixes: tuple[str, ...]
    anchor: str
    roots: tuple[str, ...]
    other_layouts: tuple[Layout, ...] = ()
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    legacy_suffixes: Mapping[str, str] = field(default_factory=dict)
    spare: tuple[str, ...] = ()
    claims: Callable[[Mapping[str, object]], bool] | None = None
    read_adapters: Callable[[Mapping[str, object]], TaskAdapters] | None = None
    prepare: Callable[[Mapping[str, Tensor], Mapping[str, object]], Mapping[str, Tensor]] | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts, in the order in which they are tried."""
        first = Layout(self.weights, self.anchor, self.roots, self.row_orders, self.transposed)
        return (first, *self.other_layouts)

    def modern_name(self, name: str) -> str:
        """Return `name` with a legacy ending replaced by the current one."""
        for old, new in self.legacy_suffixes.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def named_buffers(self, num_layers: int) -> dict[str, Buffer]:
        """Return `buffers` for all layers, by name without prefix."""
        layers = range(num_layers)
        return {name.format(layer=layer): check for name, check in self.buffers.items() for layer in layers}


def _expand_parts(names: Iterable[str], parameters: Collection[str]) -> Iterator[str]:
    """Yield the names, with `{part}` replaced by the index of each existing part."""
    for name in names:
        if "{part}" not in name:
            yield name
            continue
        for index in itertools.count():
            if (part := name.format(part=index)) not in parameters:
                break
            yield part


def linear_and_norm_names(modules: Mapping[Parameters, str]) -> dict[Parameters, str]:
    """Return the names of weights and biases, given our module names and the checkpoint's.

    A tuple of our modules is stored as one module.
    """
    return {
        _parameter_names(ours, kind): f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }


def _parameter_names(modules: Parameters, kind: str) -> Parameters:
    return (
        f"{modules}.{kind}" if isinstance(modules, str) else tuple(f"{module}.{kind}" for module in modules)
    )


def without(table: Mapping[Parameters, str], *names: str) -> dict[Parameters, str]:
    """Return a weight-name table without the parameters `names`."""
    return {ours: theirs for ours, theirs in table.items() if ours not in names}
