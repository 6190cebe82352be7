"""What can be chosen at the export about attention, which then differs from what the checkpoint says."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from attnlens_export.errors import SourceError
from attnlens_model import (
    AttentionConfig,
    BigBirdAttentionConfig,
    EncoderConfig,
    LongformerAttentionConfig,
)

RandomBlocksChoice = Literal["original", "transformers"]

_RANDOM_BLOCKS: Mapping[RandomBlocksChoice, str] = {
    "original": "original",
    "transformers": "first_block",
}


def with_choices(
    config: EncoderConfig, global_tokens: int | None, random_blocks: RandomBlocksChoice | None
) -> EncoderConfig:
    """Return the configuration with what was chosen; None changes nothing.

    Args:
        config: as the checkpoint or the user has it.
        global_tokens: how many each layer of the kind "longformer" has.
        random_blocks: those of each layer of the kind "big_bird".

    Raises:
        SourceError: something is chosen, and no layer is of that kind.
    """
    if global_tokens is not None:
        number, option = {"num_global_tokens": global_tokens}, f"--global-tokens {global_tokens}"
        config = _with_values(config, LongformerAttentionConfig, number, option)
    if random_blocks is not None:
        meaning, option = {"random_blocks": _RANDOM_BLOCKS[random_blocks]}, f"--random-blocks {random_blocks}"
        config = _with_values(config, BigBirdAttentionConfig, meaning, option)
    return config


def _with_values(
    config: EncoderConfig, kind: type[AttentionConfig], values: Mapping[str, Any], option: str
) -> EncoderConfig:
    """Return the configuration with other values in every layer of a kind."""
    attentions = config.layer_attentions
    if not any(isinstance(attention, kind) for attention in attentions):
        kinds = ", ".join(dict.fromkeys(attention.kind for attention in attentions))
        [name] = [field.default for field in dataclasses.fields(kind) if field.name == "kind"]
        raise SourceError(
            f"{option} is about attention of the kind {name}, this encoder has {kinds}: leave the option out"
        )
    changed = (
        dataclasses.replace(attention, **dict(values)) if isinstance(attention, kind) else attention
        for attention in attentions
    )
    return dataclasses.replace(config, attention=tuple(changed))
