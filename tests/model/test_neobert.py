"""NeoBERT against an implementation of its own, since transformers has none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnlens_model import CheckpointError, ConfigError, EncoderConfig, load_checkpoint
from neobert_oracle import NeoBert
from odd_models import padded_masks

MODELS = [
    NeoBert.draw(),
    NeoBert.draw(num_attention_heads=3, intermediate_size=171, norm_eps=1e-2),
    NeoBert.draw(num_attention_heads=1, num_hidden_layers=1),
]


def random_ids(mask: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, 300, mask.shape, generator=generator) * mask


def largest_difference(encoder: torch.nn.Module, model: NeoBert, mask: Tensor, dtype: torch.dtype) -> float:
    ids = random_ids(mask)
    with torch.no_grad():
        output = encoder(ids, mask, output_attentions=True)
    ours, theirs = [output.last_hidden_state, *output.attentions], model.run(ids, mask, dtype)
    live = mask.bool()
    worst = float((ours[0] - theirs[0])[live].abs().max())
    pairs = zip(ours[1:], theirs[1:], strict=True)
    return max(worst, *(float((a - b).transpose(1, 2)[live].abs().max()) for a, b in pairs))


@pytest.mark.parametrize("model", MODELS, ids=["four heads", "three heads", "one head"])
def test_random_model_matches_the_other_implementation(model: NeoBert, tmp_path: Path) -> None:
    model.save(tmp_path)
    encoder = load_checkpoint(tmp_path).encoder
    worst = max(largest_difference(encoder, model, mask, torch.float32) for mask in padded_masks(4, 40))
    print(f"NeoBERT: {worst:.2e}")  # noqa: T201 - shown by `pytest -rP`
    assert worst < 1e-5
    encoder.double()
    assert (
        max(largest_difference(encoder, model, mask, torch.float64) for mask in padded_masks(4, 40)) < 1e-12
    )


def test_published_layout_has_a_prefix_and_a_head_that_is_reported(tmp_path: Path) -> None:
    model = MODELS[0]
    model.save(tmp_path / "bare")
    expected = load_checkpoint(tmp_path / "bare").encoder.state_dict()
    head = {"decoder.weight": torch.zeros(300, 96), "decoder.bias": torch.zeros(300)}
    published = NeoBert(model.content, {f"model.{name}": each for name, each in model.tensors.items()} | head)
    published.save(tmp_path / "published")
    checkpoint = load_checkpoint(tmp_path / "published")
    assert set(checkpoint.unused_tensors) == set(head)
    assert all(torch.equal(each, expected[name]) for name, each in checkpoint.encoder.state_dict().items())


@pytest.mark.parametrize(
    ("stated", "width"), [(3072, 2048), (170, 120), (171, 120), (12, 8), (13, 8), (14, 16)]
)
def test_feed_forward_is_two_thirds_of_intermediate_size(stated: int, width: int) -> None:
    content = NeoBert.draw(intermediate_size=stated).content
    config = EncoderConfig.from_dict(content)
    assert config.intermediate_size == width
    assert EncoderConfig.from_dict(config.to_hugging_face()) == config


def test_missing_keys_default_to_those_of_the_class() -> None:
    sizes = {"norm_eps", "max_length", "pad_token_id"}
    content = {key: value for key, value in MODELS[0].content.items() if key not in sizes}
    config = EncoderConfig.from_dict(content)
    assert (config.norm.eps, config.max_tokens, config.embeddings.pad_token_id) == (1e-6, 1024, 0)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"rope": False}, {"ngpt": True}, {"rms_norm": False}], ids=str
)
def test_derived_models_are_rejected(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))}=.* is not supported"):
        EncoderConfig.from_dict(MODELS[0].content | change)


def test_rows_that_heads_do_not_divide_are_misshapen(tmp_path: Path) -> None:
    name = "transformer_encoder.1.qkv.weight"
    broken = NeoBert(MODELS[0].content, MODELS[0].tensors | {name: torch.zeros(287, 96)})
    broken.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"qkv.weight \(287, 96\) instead of \(288, 96\)"):
        load_checkpoint(tmp_path)
