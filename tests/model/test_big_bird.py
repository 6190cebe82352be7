"""BigBird against `transformers`, which has the first block in place of random ones outside of training.

A model of `transformers` that has read one short text attends fully to all later ones: each call has a copy.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from attnlens_model import ConfigError, Encoder, EncoderConfig, load_checkpoint, read_config
from attnlens_model.attention.bigbird import BigBirdAttentionConfig
from attnlens_model.attention.parts.random_blocks import draw_random_blocks
from odd_models import OddModel, random_inputs

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = OddModel("BigBird", {"block_size": 4, "num_random_blocks": 1, "layer_norm_eps": 1e-3})
MORE = OddModel(
    "BigBird",
    {"block_size": 3, "num_random_blocks": 2, "max_position_embeddings": 60, "rescale_embeddings": True},
)


def load(odd: OddModel, directory: Path, random_blocks: str | None) -> tuple[Encoder, Any]:
    """Ours and theirs in float64; None: with a file that says nothing of random blocks."""
    model = odd.make()
    model.save_pretrained(directory)
    if random_blocks is not None:
        path = directory / "config.json"
        content = json.loads(path.read_text()) | {"attnlens_random_blocks": random_blocks}
        path.write_text(json.dumps(content))
    encoder = load_checkpoint(directory).encoder
    assert isinstance(encoder, Encoder)
    return encoder.double(), model.double()


def difference(encoder: Encoder, model: Any, inputs: dict[str, Tensor]) -> float:
    """Of the hidden states of live tokens."""
    with torch.no_grad():
        theirs = copy.deepcopy(model)(**inputs).last_hidden_state
        ours = encoder(**inputs).last_hidden_state
    return float((ours - theirs)[inputs["attention_mask"] == 1].abs().max())


@pytest.mark.parametrize("odd", [SMALL, MORE], ids=str)
def test_with_the_first_block_repeated_it_matches_transformers(odd: OddModel, tmp_path: Path) -> None:
    encoder, model = load(odd, tmp_path, "first_block")
    size, longest = model.config.block_size, model.config.max_position_embeddings
    full = (5 + 2 * model.config.num_random_blocks) * size
    for length in (1, size, full, full + 1, full + size, full + size + 1, longest):
        mask = torch.ones(4, length, dtype=torch.int64)
        # The last block of their batch is that of each text, as it is here for any batch.
        mask[1, length // 3 : length // 2] = 0
        mask[2, : length // 4] = 0
        # A text that would attend fully by itself, and attends by blocks where it ends.
        mask[3, : 2 * length // 3] = 0
        assert difference(encoder, model, random_inputs(model.config, mask)) < 1e-12


@pytest.mark.parametrize("max_positions", [1024, 4096])
def test_with_the_original_blocks_it_matches_transformers_in_training(
    max_positions: int, tmp_path: Path
) -> None:
    """At 1,024 tokens, where both draw the blocks as the published implementation does."""
    changes = {"max_position_embeddings": max_positions, "num_hidden_layers": 2, "hidden_size": 48}
    odd = OddModel("BigBird", NO_DROPOUT | changes, std=0.3)
    encoder, model = load(odd, tmp_path, None)
    inputs = random_inputs(model.config, torch.ones(1, 1024, dtype=torch.int64))
    assert difference(encoder, model, inputs) > 1e-3  # it has the first block in their place
    assert difference(encoder, model.train(), inputs) < 1e-12


@pytest.mark.parametrize(
    ("tokens", "size", "num_random", "seed"),
    [
        (4096, 64, 3, 0),
        (4096, 64, 3, 7),
        (1024, 64, 3, 1),
        (4096, 16, 2, 5),
        (512, 64, 1, 2),
        (9216, 512, 2, 3),
    ],
)
def test_random_blocks_are_drawn_as_transformers_draws_them_in_training(
    tokens: int, size: int, num_random: int, seed: int
) -> None:
    config = OddModel("BigBird", {"max_position_embeddings": tokens}).config()
    attention: Any = BigBirdBlockSparseAttention
    module = attention(config, seed).train()
    before = np.random.get_state()  # noqa: NPY002 - theirs
    np.random.seed(seed)  # noqa: NPY002
    theirs = [
        module._bigbird_block_rand_mask(tokens, tokens, size, size, num_random, last_idx=1024)
        for _ in range(3)
    ]
    np.random.set_state(before)  # noqa: NPY002
    np.testing.assert_array_equal(draw_random_blocks(3, tokens, size, num_random, seed), theirs)


def test_random_blocks_default_to_the_original_ones(tmp_path: Path) -> None:
    SMALL.config().save_pretrained(tmp_path)
    config = read_config(tmp_path / "config.json")
    layers = config.layer_attentions
    assert [
        (layer.random_blocks, layer.seed) for layer in layers if isinstance(layer, BigBirdAttentionConfig)
    ] == [("original", 0), ("original", 1), ("original", 2)]
    tables = [layer.outputs()[0].pattern for layer in layers]
    assert len({id(table) for table in tables}) == 3


@pytest.mark.parametrize("random_blocks", ["original", "first_block"])
@pytest.mark.parametrize("odd", [SMALL, MORE], ids=str)
def test_configuration_survives_both_kinds_of_file(odd: OddModel, random_blocks: str) -> None:
    config = EncoderConfig.from_dict(odd.config().to_dict() | {"attnlens_random_blocks": random_blocks})
    assert EncoderConfig.from_json(config.to_json()) == config
    assert EncoderConfig.from_dict(config.to_hugging_face()) == config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention_type", "simulated_sparse", "choose one of block_sparse, original_full"),
        ("attnlens_random_blocks", "none", "choose one of original, first_block"),
        ("use_bias", False, "only True is"),
        ("is_decoder", True, "blocks attend in both directions"),
        ("block_size", "64", "it must be int"),
        ("num_hidden_layers", "3", "it must be int"),
    ],
)
def test_unsupported_values_are_rejected_by_name(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(SMALL.config().to_dict() | {key: value})
