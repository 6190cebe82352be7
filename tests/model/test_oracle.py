"""Our encoder against `transformers.BertModel`, which we did not write: hidden states, attention maps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from attnlens_model import load_checkpoint
from odd_models import padded_masks

SENTENCES = [
    "The animal didn't cross the street because it was too tired.",
    "Attention is all you need.",
    "Größere Räder, kleinere Wege: naïve café owners disagree (42 %)!",
    "",
    "a very long line " * 40,
]


def odd_bert(**changes: Any) -> Any:
    """A BERT of odd sizes, with every parameter random so that no default can hide a wrong name."""
    sizes = {
        "vocab_size": 300,
        "hidden_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "intermediate_size": 160,
        "max_position_embeddings": 64,
    }
    options: dict[str, Any] = sizes | changes | {"attn_implementation": "eager"}
    model: Any = BertModel(BertConfig(**options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if name.endswith("LayerNorm.weight") else 0.15 * noise)
    return model.eval()


def largest_differences(
    directory: Path, model: nn.Module, dtype: torch.dtype = torch.float32, **inputs: Tensor
) -> tuple[float, float]:
    """Of the hidden states and of the attention maps, over live tokens."""
    encoder = load_checkpoint(directory).encoder.to(dtype)
    model.to(dtype)
    with torch.no_grad():
        ours = encoder(**inputs, output_attentions=True)
        theirs = model(**inputs, output_attentions=True)
    live = inputs["attention_mask"].bool()
    hidden = (ours.last_hidden_state - theirs.last_hidden_state)[live].abs().max()
    assert len(ours.attentions) == len(theirs.attentions) == encoder.config.num_layers
    maps = [
        (a - b).transpose(1, 2)[live].abs().max()  # (live, H, T)
        for a, b in zip(ours.attentions, theirs.attentions, strict=True)
    ]
    return float(hidden), float(max(maps))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu", "layer_norm_eps": 1e-12},
        {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 17},
        {"hidden_act": "gelu_pytorch_tanh", "type_vocab_size": 3},
        {"hidden_act": "relu", "layer_norm_eps": 1e-5, "max_position_embeddings": 130},
        {"num_attention_heads": 1, "num_hidden_layers": 1, "type_vocab_size": 1},
        {"is_decoder": True, "layer_norm_eps": 1e-3},
    ],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()),
)
def test_random_bert_matches_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = odd_bert(**changes)
    model.save_pretrained(tmp_path)
    tokens = min(50, model.config.max_position_embeddings)
    for mask in padded_masks(4, tokens):
        inputs = {
            "input_ids": torch.randint(0, 300, mask.shape),
            "attention_mask": mask,
            "token_type_ids": torch.randint(0, model.config.type_vocab_size, mask.shape),
        }
        assert max(largest_differences(tmp_path, model, torch.float32, **inputs)) < 1e-5
        # Where rounding no longer hides anything.
        assert max(largest_differences(tmp_path, model, torch.float64, **inputs)) < 1e-12


def test_in_training_dropout_acts_where_transformers_lets_it_act(tmp_path: Path) -> None:
    model = odd_bert(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2).train()
    model.save_pretrained(tmp_path)
    encoder = load_checkpoint(tmp_path).encoder.train()
    ids, mask = torch.randint(0, 300, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    # From the same seed both draw the same numbers if they drop the same tensors in the same order.
    torch.manual_seed(1)
    theirs = model(ids, mask).last_hidden_state
    torch.manual_seed(1)
    ours = encoder(ids, mask).last_hidden_state
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("side", ["right", "left"])
def test_minilm_matches_transformers_on_real_text(minilm_dir: Path, side: str) -> None:
    model: Any = BertModel.from_pretrained(minilm_dir, attn_implementation="eager")
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.enable_padding(direction=side)
    tokenizer.enable_truncation(512)
    encodings = tokenizer.encode_batch(SENTENCES)
    hidden, maps = largest_differences(
        minilm_dir,
        model.eval(),
        input_ids=torch.tensor([encoding.ids for encoding in encodings]),
        attention_mask=torch.tensor([encoding.attention_mask for encoding in encodings]),
        token_type_ids=torch.tensor([encoding.type_ids for encoding in encodings]),
    )
    print(f"MiniLM, {side} padding: hidden {hidden:.2e}, attention {maps:.2e}")  # noqa: T201 - shown by `pytest -rP`
    assert hidden < 1e-5
    assert maps < 1e-5


def test_minilm_reports_its_pooler_as_unused(minilm_dir: Path) -> None:
    checkpoint = load_checkpoint(minilm_dir)
    assert checkpoint.unused_tensors == ("pooler.dense.bias", "pooler.dense.weight")
    assert checkpoint.source == "model"
    assert checkpoint.directory == minilm_dir
    assert (checkpoint.config.num_layers, checkpoint.config.num_heads) == (6, 12)
    assert checkpoint.encoder.get_submodule("layers.0.attention").head_dim == 32
