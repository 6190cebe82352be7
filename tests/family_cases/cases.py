"""Test cases of a group of families."""

from dataclasses import dataclass, field

from odd_models import OddModel


@dataclass(frozen=True)
class FamilyCases:
    """Random models of `transformers` that the encoder, its checkpoints and its graphs are compared with.

    Attributes:
        models: of our families: whatever a configuration can say that matters is in one of them.
        traced: of types that are traced from the module of transformers.
        one_of_each: one for each layout of tensors.
        heads: a model, the task head to put on it, and tensors that must be reported as unused.
        exported: Model to export, by family name.
        operators: Operators in addition to those of BERT, by family name.
    """

    models: list[OddModel]
    traced: list[OddModel]
    one_of_each: list[OddModel]
    heads: list[tuple[OddModel, str, set[str]]] = field(default_factory=list)
    exported: dict[str, OddModel] = field(default_factory=dict)
    operators: dict[str, set[str]] = field(default_factory=dict)
