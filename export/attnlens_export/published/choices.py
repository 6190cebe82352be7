"""What no checkpoint says of its attention, and whoever exports it may choose."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from attnlens_export.errors import SourceError
from attnlens_model import EncoderConfig
from attnlens_model.attention.bigbird import RandomBlocks

RandomBlocksChoice = Literal["original", "transformers"]

MEANINGS: Mapping[RandomBlocksChoice, RandomBlocks] = {
    "original": "original",
    "transformers": "first_block",
}


# By kind of attention, the fields that a choice replaces.
_CHOSEN = {"longformer": ("num_global_tokens",), "big_bird": ("random_blocks",)}


class AttentionChoices(NamedTuple):
    """What is chosen; None: what the configuration says.

    Attributes:
        global_tokens: how many global tokens each layer of the kind "longformer" has.
        random_blocks: which blocks those of the kind "big_bird" attend to at random: those that the model was
            trained with, or none, as transformers computes it.
    """

    global_tokens: int | None = None
    random_blocks: RandomBlocksChoice | None = None

    def applied(self, config: EncoderConfig) -> EncoderConfig:
        """Return the configuration as it was chosen.

        Raises:
            SourceError: a choice is about attention that the encoder does not have.
        """
        if self.global_tokens is not None:
            option = f"--global-tokens {self.global_tokens}"
            config = _changed(config, "longformer", option, num_global_tokens=self.global_tokens)
        if self.random_blocks is not None:
            option = f"--random-blocks {self.random_blocks}"
            config = _changed(config, "big_bird", option, random_blocks=MEANINGS[self.random_blocks])
        return config


def with_choices_of(bundle: EncoderConfig, config: EncoderConfig) -> EncoderConfig:
    """Return the configuration of a checkpoint with what was chosen when a bundle was made of it."""
    if bundle.num_layers != config.num_layers:
        return config
    layers = zip(config.layer_attentions, bundle.layer_attentions, strict=True)
    chosen = tuple(
        dataclasses.replace(own, **{field: getattr(other, field) for field in _CHOSEN.get(own.kind, ())})
        if own.kind == other.kind
        else own
        for own, other in layers
    )
    return dataclasses.replace(config, attention=chosen)


def _changed(config: EncoderConfig, kind: str, option: str, **changes: Any) -> EncoderConfig:  # noqa: ANN401 - fields
    layers = config.layer_attentions
    if all(attention.kind != kind for attention in layers):
        kinds = ", ".join(dict.fromkeys(attention.kind for attention in layers))
        raise SourceError(
            f"{option} is about attention of the kind {kind}, this encoder has {kinds}: leave the option out"
        )
    changed = tuple(
        dataclasses.replace(attention, **changes) if attention.kind == kind else attention
        for attention in layers
    )
    return dataclasses.replace(config, attention=changed)
