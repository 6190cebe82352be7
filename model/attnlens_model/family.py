"""What the package must know about a family of published encoders: how it names things.

A family is data: one `FAMILY = Family(...)` in one module of `families`. All share one encoder, whose parts
`EncoderConfig` chooses.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from attnlens_model.attention.mechanism import AttentionConfig, EncoderSizes

# A parameter of ours, or several that a checkpoint keeps as one tensor, in this order along its first axis.
Parameters = str | tuple[str, ...]

# Makes, of the number of heads and of all rows' numbers, (rows,) int64, these in the order of our parameters.
RowOrder = Callable[[int, Tensor], Tensor]

# Returns whether a stored tensor has the values that an encoder with this attention in layer 0 computes.
Buffer = Callable[[EncoderSizes, AttentionConfig, Tensor], bool]


@dataclass(frozen=True)
class Layout:
    """How a checkpoint names the tensors of an encoder.

    Attributes:
        weights: our parameter name, or the names of those that are stored as one -> the checkpoint's tensor
            name. `{layer}` stands for the layer number, `{part}` for that of a part, such as an expert: all
            that differ in it alone are stored as one. Empty: the checkpoint has our names.
        anchor: a tensor (as named in `weights`) that every such checkpoint has and that tells the prefix.
        roots: a tensor under the prefix that begins so belongs to the encoder: it must be in `weights`.
            Anything else (pooler, task heads) is ignored and reported.
        row_orders: what a tensor's name ends with -> the order of its rows, where it is not that of our
            parameters.
    """

    weights: Mapping[Parameters, str]
    anchor: str
    roots: tuple[str, ...]
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)

    def weight_names(
        self, num_layers: int, parameters: Iterable[str]
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (our parameter names, the checkpoint's tensor name without prefix).

        Args:
            num_layers: layers that share their weights count once.
            parameters: of the encoder.
        """
        known = tuple(parameters)
        if not self.weights:
            yield from (((name,), name) for name in known)
        for stored, theirs in self.weights.items():
            ours = (stored,) if isinstance(stored, str) else stored
            for layer in range(num_layers if "{layer}" in ours[0] else 1):
                names = [name.replace("{layer}", str(layer)) for name in ours]
                if parts := tuple(_of_parts(names, known)):
                    yield parts, theirs.format(layer=layer)

    def row_order(self, name: str) -> RowOrder | None:
        """Return the order of the rows of the checkpoint's tensor `name`; None: that of our parameters."""
        return next((order for ending, order in self.row_orders.items() if name.endswith(ending)), None)


@dataclass(frozen=True)
class TaskAdapters:
    """The low-rank adapters that a checkpoint has beside its weights.

    Attributes:
        tasks: what each is for, in the order in which the checkpoint stacks them.
        scale: what the product of their two matrices is multiplied by.
    """

    tasks: tuple[str, ...]
    scale: float


@dataclass(frozen=True)
class Family:
    """The names that one family of checkpoints uses, beside ours.

    Attributes:
        name: our name of the family, the value of `EncoderConfig.family`.
        model_types: the `model_type` values of a Hugging Face `config.json` that mean this family.
        architecture: the class that such a file names for the encoder alone.
        read_config: turns such a file's content into values of an `EncoderConfig` by path.
        write_config: turns such values into a file's content. `attention` is the list of its pattern,
            `attention.num_heads` and the like are of its first; `feed_forward` likewise.
        weights: see `Layout`, as are `anchor`, `roots` and `row_orders`: the layout that is tried first.
        prefixes: what may stand before all of those names; exactly one must fit a checkpoint.
        other_layouts: further ones, as of checkpoints that were published with code of their own.
        buffers: Tensors under the roots that some files store and the encoder computes. `{layer}` stands for
            the layer number. A checkpoint with other values is refused.
        legacy_suffixes: old name endings -> today's. A tensor that is stored under both names must be the
            same, bit for bit.
        transforms: endings of our parameter names -> what makes the parameter of the checkpoint's values, in
            fp32.
        spare: parameters with one of these in our name may be in a checkpoint though the encoder that its
            configuration describes has no use for them.
        claims: whether such a file's content means this family, where another has the same `model_type`;
            None: it does where no other claims it.
        read_adapters: what such a file's content says of adapters among the tensors; None: there are none.
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
    legacy_suffixes: Mapping[str, str] = field(default_factory=dict)
    transforms: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    spare: tuple[str, ...] = ()
    claims: Callable[[Mapping[str, object]], bool] | None = None
    read_adapters: Callable[[Mapping[str, object]], TaskAdapters] | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts, in the order in which they are tried."""
        return (Layout(self.weights, self.anchor, self.roots, self.row_orders), *self.other_layouts)

    def modern_name(self, name: str) -> str:
        """Return `name` with a legacy ending replaced by today's."""
        for old, new in self.legacy_suffixes.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name

    def named_buffers(self, num_layers: int) -> dict[str, Buffer]:
        """Return `buffers` by their names without prefix."""
        layers = range(num_layers)
        return {name.format(layer=layer): holds for name, holds in self.buffers.items() for layer in layers}

    def transformed(self, name: str, values: Tensor) -> Tensor:
        """Return what our parameter `name` is, given its values in the checkpoint."""
        for ending, transform in self.transforms.items():
            if name.endswith(ending):
                return transform(values)
        return values


def _of_parts(names: Iterable[str], parameters: Collection[str]) -> Iterator[str]:
    """Yield the names, each with `{part}` once for every part that there is."""
    for name in names:
        if "{part}" not in name:
            yield name
            continue
        for number in itertools.count():
            if (part := name.format(part=number)) not in parameters:
                break
            yield part


def linear_and_norm_names(modules: Mapping[Parameters, str]) -> dict[Parameters, str]:
    """Return the names of the weight and the bias of modules, by our names and theirs.

    Several modules of ours may be one of theirs.
    """
    return {
        _named(ours, kind): f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }


def _named(modules: Parameters, kind: str) -> Parameters:
    return (
        f"{modules}.{kind}" if isinstance(modules, str) else tuple(f"{module}.{kind}" for module in modules)
    )
