"""Attention settings that checkpoints do not store and that can be chosen at export."""

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


# Fields that a choice overrides, by attention kind.
_CHOSEN = {"longformer": ("num_global_tokens",), "big_bird": ("random_blocks",)}


class AttentionChoices(NamedTuple):
    """Attention settings chosen at export. Fields set to None keep the checkpoint's configuration.

    Attributes:
        global_tokens: Number of global tokens of "longformer" attention.
        random_blocks: Random blocks of "big_bird" attention: "original" for the blocks used in training, or
            "transformers" for the blocks that transformers uses.
    """

    global_tokens: int | None = None
    random_blocks: RandomBlocksChoice | None = None

    def applied(self, config: EncoderConfig) -> EncoderConfig:
        """Return `config` with the choices applied.

        Raises:
            SourceError: A choice applies to an attention kind that the encoder does not use.
        """
        if self.global_tokens is not None:
            option = f"--global-tokens {self.global_tokens}"
            config = _changed(config, "longformer", option, num_global_tokens=self.global_tokens)
        if self.random_blocks is not None:
            option = f"--random-blocks {self.random_blocks}"
            config = _changed(config, "big_bird", option, random_blocks=MEANINGS[self.random_blocks])
        return config


def with_choices_of(bundle: EncoderConfig, config: EncoderConfig) -> EncoderConfig:
    """Return a checkpoint's configuration with the choices made when `bundle` was exported."""
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
            f"{option} requires {kind} attention, but this encoder uses {kinds}: omit the option"
        )
    changed = tuple(
        dataclasses.replace(attention, **changes) if attention.kind == kind else attention
        for attention in layers
    )
    return dataclasses.replace(config, attention=changed)
