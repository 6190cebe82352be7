"""What the package must know about a family of published encoders: how it names things.

A family is data: one `FAMILY = Family(...)` in one module of `families`. All share one encoder, whose parts
`EncoderConfig` chooses.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """The names that one family of checkpoints uses, beside ours.

    Attributes:
        name: our name of the family, the value of `EncoderConfig.family`.
        model_types: the `model_type` values of a Hugging Face `config.json` that mean this family.
        architecture: the class that such a file names for the encoder alone.
        read_config: turns such a file's content into keyword arguments of `EncoderConfig`.
        write_config: turns the fields of an `EncoderConfig` into such a file's content.
        weights: our parameter name -> the checkpoint's tensor name. `{layer}` stands for the layer number.
        prefixes: what may stand before all of those names; exactly one must fit a checkpoint.
        anchor: a tensor (as named in `weights`) that every checkpoint has and that tells the prefix.
        roots: a tensor under the prefix that begins so belongs to the encoder: it must be in `weights`.
            Anything else (pooler, task heads) is ignored and reported.
        buffers: tensors under the roots that hold no weights, saved by older versions.
        legacy_suffixes: old name endings -> today's.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    read_config: Callable[[Mapping[str, object]], dict[str, object]]
    write_config: Callable[[Mapping[str, object]], dict[str, object]]
    weights: Mapping[str, str]
    prefixes: tuple[str, ...]
    anchor: str
    roots: tuple[str, ...]
    buffers: tuple[str, ...] = ()
    legacy_suffixes: Mapping[str, str] = field(default_factory=dict)

    def weight_names(self, num_layers: int) -> Iterator[tuple[str, str]]:
        """Yield (our parameter name, the checkpoint's tensor name without prefix) for `num_layers` layers.

        Layers that share their weights count once.
        """
        for ours, theirs in self.weights.items():
            if "{layer}" not in ours:
                yield ours, theirs
                continue
            for layer in range(num_layers):
                yield ours.format(layer=layer), theirs.format(layer=layer)

    def modern_name(self, name: str) -> str:
        """Return `name` with a legacy ending replaced by today's."""
        for old, new in self.legacy_suffixes.items():
            if name.endswith(old):
                return name.removesuffix(old) + new
        return name


def linear_and_norm_names(modules: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the weight and the bias of modules, by our names and theirs."""
    return {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }
