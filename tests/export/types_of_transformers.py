"""Exports an encoder of every type of transformers that docs/families.md lists: `make test-types`.

Random weights, two layers, and a width at which no dimension equals another. All gates apply.
"""

from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

from attnlens_export import ExportError, ExportOptions, export_bundle
from attnlens_model import ConfigError
from attnlens_model.families import SUPPORTED_TYPES
from family_cases import EXPORTED as OF_FAMILIES
from odd_models import OddModel

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARED = {"num_key_value_heads": 2}
WINDOW = {"sliding_window": 9}
EXPORTED: dict[str, dict[str, Any]] = {
    "Arcee": SHARED,
    "BioGpt": {},
    "BitNet": SHARED,
    "CTRL": {"dff": 160},
    "CodeGen": {"rotary_dim": 8, "n_inner": 160},
    "Cohere": SHARED,
    "Cohere2": SHARED | WINDOW,
    "Ernie4_5": SHARED | {"head_dim": 24},
    "Esm": {"pad_token_id": 1, "position_embedding_type": "rotary"},
    "Exaone4": SHARED | WINDOW,
    "Flaubert": {},
    "GPTBigCode": {"n_inner": 160},
    "GPTJ": {"rotary_dim": 16, "n_inner": 160},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "GPTNeoX": {},
    "Gemma": SHARED | {"head_dim": 20},
    "Gemma2": SHARED | WINDOW | {"head_dim": 20, "query_pre_attn_scalar": 20},
    "Glm": SHARED | {"head_dim": 24},
    "Glm4": SHARED | {"head_dim": 24},
    "Granite": SHARED | {"residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "Helium": SHARED | {"head_dim": 24},
    "HunYuanDenseV1": SHARED | {"head_dim": 24},
    "LayoutLM": {},
    "Lfm2": SHARED | {"layer_types": ["full_attention", "full_attention"]},
    "Luke": {"entity_vocab_size": 20, "entity_emb_size": 16, "pad_token_id": 1},
    "MarkupLM": {},
    "Ministral": SHARED | WINDOW | {"head_dim": 24},
    "ModernBertDecoder": {"local_attention": 10, "cls_token_id": 3, "sep_token_id": 4},
    "Nemotron": SHARED,
    "Olmo": SHARED,
    "Olmo2": SHARED,
    "Olmo3": SHARED | WINDOW,
    "Persimmon": {},
    "Phi": SHARED | {"partial_rotary_factor": 0.5},
    "Phi3": SHARED | WINDOW,
    "RoCBert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 60},
    "SeedOss": SHARED | {"head_dim": 24},
    "SmolLM3": SHARED,
    "StableLm": SHARED,
    "Starcoder2": SHARED | WINDOW,
    "VaultGemma": SHARED | WINDOW | {"head_dim": 20, "query_pre_attn_scalar": 20},
    "XLM": {"pad_token_id": 2},
}
WITHOUT_CONTRIBUTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "Apertus": (SHARED, "depends on the text nonlinearly: there is no rule for Where"),
    "DiffLlama": (
        SHARED,
        "layer 0 multiplies its attention weights by 2 values, so a head has no single output",
    ),
}
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": ({}, "it returns no attention weights|states no max_position_embeddings"),
    "MobileBert": ({}, "differ by .* between a text of 1 tokens in a batch and alone"),
    "Nystromformer": ({}, "differ by .* between a text of 1 tokens in a batch and alone"),
    "OPT": ({"ffn_dim": 160, "word_embed_proj_dim": 96}, "at most one axis may change to an unknown length"),
    "SqueezeBert": ({"embedding_size": 96}, "deviation of a row sum from 1"),
    "XGLM": ({"d_model": 96, "attention_heads": 4, "num_layers": 2}, "at most one axis may change"),
    "Yoso": ({}, "attention weights"),
}


# Also in tests/model/test_families.py.
COMPARED = [odd for odd in OF_FAMILIES.values() if odd.config().model_type not in SUPPORTED_TYPES]


def export(odd: OddModel, directory: Path) -> Any:
    odd.make().save_pretrained(directory / "source")
    options = ExportOptions(pooling="mean", faithfulness=False)
    return export_bundle(directory / "source", directory / "bundle", options)


def make_odd(name: str, changes: dict[str, Any]) -> OddModel:
    return OddModel(name, SIZES | changes, std=0.08)


@pytest.mark.parametrize("odd", [*starmap(make_odd, EXPORTED.items()), *COMPARED], ids=lambda odd: odd.name)
def test_type_is_exported_with_contributions(odd: OddModel, tmp_path: Path) -> None:
    summary = export(odd, tmp_path)
    assert summary.verdict.passed
    assert "contributions" in [graph.id for graph in summary.manifest.graphs]
    assert summary.warnings[1:] == ()  # the first one states that there is no tokenizer


@pytest.mark.parametrize("name", WITHOUT_CONTRIBUTIONS)
def test_type_is_exported_without_contributions(name: str, tmp_path: Path) -> None:
    changes, reason = WITHOUT_CONTRIBUTIONS[name]
    summary = export(make_odd(name, changes), tmp_path)
    assert [graph.id for graph in summary.manifest.graphs] == ["embeddings", "attention"]
    assert reason in summary.warnings[-1]


@pytest.mark.parametrize("name", REJECTED)
def test_type_is_rejected_by_name(name: str, tmp_path: Path) -> None:
    changes, reason = REJECTED[name]
    with pytest.raises((ConfigError, ExportError), match=reason):
        export(make_odd(name, changes), tmp_path)
