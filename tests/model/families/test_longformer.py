"""Longformer against transformers, whose global tokens are those that a mask names, and which returns a band.

Letters in shapes: B batch, T tokens, H heads, G global tokens, w window.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attnlens.patterns import Band
from attnlens_model import (
    ConfigError,
    Encoder,
    EncoderConfig,
    LongformerAttentionConfig,
    ModuleEncoder,
    load_checkpoint,
    read_config,
)
from attnlens_model.families import FAMILIES
from odd_models import OddModel, float64_throughout, padded_masks, random_inputs

SIZES = {"pad_token_id": 1, "max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
ODD_MODELS = [
    OddModel("Longformer", SIZES | {"attention_window": [8, 4, 16]}, 40, std=0.1),
    OddModel(
        "Longformer", SIZES | {"attention_window": 4, "type_vocab_size": 2, "pad_token_id": 7}, 37, std=0.1
    ),
    OddModel("Longformer", SIZES | {"attention_window": 80, "hidden_act": "relu"}, 9, std=0.1),
    OddModel("Longformer", SIZES | {"attention_window": [6, 6, 6], "num_attention_heads": 4}, 1),
]


def save(odd: OddModel, directory: Path, num_global: int = 1) -> Any:
    """Save a model with our key, and return it."""
    model = odd.make()
    model.save_pretrained(directory)
    path = directory / "config.json"
    content = json.loads(path.read_text()) | {"attnlens_global_tokens": num_global}
    path.write_text(json.dumps(content))
    return model


def first_tokens(mask: Tensor, number: int) -> Tensor:
    """(B, T): 1 for the first `number` tokens that are no padding."""
    return ((mask.cumsum(1) <= number) & (mask == 1)).long()


def run_theirs(model: Any, inputs: dict[str, Tensor], num_global: int) -> tuple[Tensor, list[np.ndarray]]:
    """Hidden states, and by layer the weights (B, H, T, T)."""
    mask = inputs["attention_mask"]
    chosen = first_tokens(mask, num_global)
    windows = list(model.config.attention_window)
    with torch.no_grad():
        output = model(**inputs, global_attention_mask=chosen, output_attentions=True)
    bands = [band[:, :, : mask.shape[1]].numpy() for band in output.attentions]
    most = int(chosen.sum(1).max())
    given: list[Any] = [None] * len(bands)
    if most:
        # (B, H, T and more, G), key by query.
        given = [weights[:, :, : mask.shape[1]].numpy() for weights in output.global_attentions]
    maps = [
        np.stack(
            [
                rebuild(
                    band[text],
                    both // 2,
                    most,
                    None if own is None else own[text],
                    np.flatnonzero(chosen[text]),
                )
                for text in range(len(mask))
            ]
        )
        for band, own, both in zip(bands, given, windows, strict=True)
    ]
    return output.last_hidden_state, maps


def rebuild(
    band: np.ndarray, window: int, most: int, given: np.ndarray | None, places: np.ndarray
) -> np.ndarray:
    """Return (H, T, T) of (H, T, G + 2w + 1) and of (H, T, G): by hand, as transformers lays them out."""
    num_heads, num_tokens, _ = band.shape
    weights = np.zeros((num_heads, num_tokens, num_tokens), dtype=band.dtype)
    for query in range(num_tokens):
        for key in range(max(0, query - window), min(num_tokens, query + window + 1)):
            weights[:, query, key] = band[:, query, most + window + key - query]
        for number, key in enumerate(places):
            weights[:, query, key] += band[:, query, number]
    for number, query in enumerate(places):
        assert given is not None
        weights[:, query] = given[:, :, number]
    return weights


def largest_differences(
    encoder: Encoder | ModuleEncoder, model: Any, inputs: dict[str, Tensor], num_global: int
) -> list[float]:
    """Of hidden states and weights over live tokens."""
    hidden, maps = run_theirs(model, inputs, num_global)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        output = encoder(**inputs, output_attentions=True)
    worst = 0.0
    for layer, theirs in enumerate(maps):
        pattern = encoder.config.layer_outputs(layer)[0].pattern
        assert isinstance(pattern, Band)
        rows = zip(output.attentions[layer].numpy(), mask.numpy(), strict=True)
        ours = np.stack([pattern.dense(row, live) for row, live in rows])
        worst = max(worst, float(np.abs(ours - theirs).transpose(0, 2, 1, 3)[mask == 1].max()))
    return [float((output.last_hidden_state - hidden)[mask == 1].abs().max()), worst]


@pytest.mark.parametrize("num_global", [0, 1, 3])
@pytest.mark.parametrize("odd", ODD_MODELS, ids=str)
def test_random_model_matches_transformers(odd: OddModel, num_global: int, tmp_path: Path) -> None:
    model = save(odd, tmp_path, num_global)
    encoder = load_checkpoint(tmp_path).encoder
    batches = [random_inputs(model.config, mask) for mask in padded_masks(4, odd.num_tokens)]
    worst = [
        max(pair)
        for pair in zip(*(largest_differences(encoder, model, b, num_global) for b in batches), strict=True)
    ]
    print(f"{odd} global={num_global}: hidden {worst[0]:.2e}, attention {worst[1]:.2e}")  # noqa: T201 - shown by `pytest -rP`
    assert max(worst) < 1e-5
    encoder.double()
    with float64_throughout(model):
        assert max(max(largest_differences(encoder, model, b, num_global)) for b in batches) < 1e-12


def test_projections_of_global_tokens_are_spare_where_there_are_none(tmp_path: Path) -> None:
    save(ODD_MODELS[0], tmp_path, num_global=0)
    checkpoint = load_checkpoint(tmp_path)
    names = {name for name, _ in checkpoint.encoder.named_parameters()}
    assert not any("global" in name for name in names)
    assert "encoder.layer.2.attention.self.value_global.bias" in checkpoint.unused_tensors


def test_dense_form_is_read_and_written(tmp_path: Path) -> None:
    content = ODD_MODELS[0].config().to_dict() | {"attnlens_form": "dense", "attnlens_global_tokens": 2}
    config = EncoderConfig.from_dict(content)
    for attention, window in zip(config.layer_attentions, [4, 2, 8], strict=True):
        assert attention == LongformerAttentionConfig(
            num_heads=3, window=window, num_global_tokens=2, form="dense"
        )
    assert EncoderConfig.from_dict(config.to_hugging_face()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hugging_face()))
    theirs = type(ODD_MODELS[0].config()).from_pretrained(tmp_path)
    assert theirs.attention_window == [8, 4, 16]
    assert EncoderConfig.from_dict(theirs.to_dict()) == config


def test_missing_keys_default_to_those_of_transformers(tmp_path: Path) -> None:
    content = {"model_type": "longformer", "max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(SMALL | content))
    theirs = type(ODD_MODELS[0].config()).from_pretrained(tmp_path)
    config = read_config(tmp_path / "config.json")
    assert config == EncoderConfig.from_dict(theirs.to_dict())
    assert config.attention == LongformerAttentionConfig(num_heads=12, window=256, num_global_tokens=1)
    assert config.max_tokens == 98


SMALL = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (7, r"attention_window=7 is not supported: it must be an even integer of at least 2"),
        (0, r"attention_window=0 is not supported"),
        ("8", r"attention_window='8' is not supported"),
        ([8, 6, 5], r"attention_window=\[8, 6, 5\] is not supported"),
        ([8, 6], r"has 2 windows: it must have one for each of 3 layers, or be an integer"),
    ],
)
def test_invalid_window_is_rejected(window: object, message: str) -> None:
    content = ODD_MODELS[0].config().to_dict() | {"attention_window": window}
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(content)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering"])
def test_task_model_loads_as_its_encoder(head: str, tmp_path: Path) -> None:
    """The classifier's first token is global by itself, and so it is here."""
    odd = ODD_MODELS[0]
    model = odd.make(head)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.unused_tensors
    assert not any("encoder" in name for name in checkpoint.unused_tensors)
    inputs = random_inputs(model.config, torch.ones(2, 9, dtype=torch.int64))
    body = model.longformer
    assert max(largest_differences(checkpoint.encoder, body, inputs, 1)) < 1e-5


def test_every_prefix_is_found(tmp_path: Path) -> None:
    model = save(ODD_MODELS[0], tmp_path)
    expected = load_checkpoint(tmp_path).encoder.state_dict()
    (tmp_path / "model.safetensors").unlink()
    family = FAMILIES["longformer"]
    for prefix in family.prefixes:
        tensors = {prefix + name: tensor for name, tensor in model.state_dict().items()}
        # As older versions saved them.
        tensors |= {prefix + "embeddings.position_ids": torch.arange(64)[None]}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        found = load_checkpoint(tmp_path).encoder.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
