"""Which random blocks a checkpoint of BigBird is exported with, where the user chooses."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch

from attnlens_export.errors import SourceError
from attnlens_model import Checkpoint, Encoder
from attnlens_model.attention.bigbird import BigBirdAttentionConfig, RandomBlocks

Choice = Literal["original", "transformers"]

MEANINGS: Mapping[Choice, RandomBlocks] = {"original": "original", "transformers": "first_block"}


def choose_random_blocks(checkpoint: Checkpoint, choice: Choice | None) -> Checkpoint:
    """Return the checkpoint with the encoder that attends to the chosen blocks, with the same weights.

    Args:
        checkpoint: as it was loaded.
        choice: what was trained ("original"), or what transformers computes; None: what the checkpoint says.

    Raises:
        SourceError: something is chosen, and the encoder has no random blocks.
    """
    if choice is None:
        return checkpoint
    config = checkpoint.config
    layers = config.layer_attentions
    if not any(isinstance(layer, BigBirdAttentionConfig) for layer in layers):
        raise SourceError(
            f"{checkpoint.source} has no random blocks to choose, which BigBird alone has: leave out "
            "--random-blocks"
        )
    chosen = tuple(
        dataclasses.replace(layer, random_blocks=MEANINGS[choice])
        if isinstance(layer, BigBirdAttentionConfig)
        else layer
        for layer in layers
    )
    config = dataclasses.replace(config, attention=chosen)
    # Without storage: the parameters are those that were loaded.
    with torch.device("meta"):
        encoder = Encoder(config)
    encoder.load_state_dict(checkpoint.encoder.state_dict(), assign=True)
    return dataclasses.replace(checkpoint, config=config, encoder=encoder.eval())
