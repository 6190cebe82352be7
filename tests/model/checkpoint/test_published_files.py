"""Checkpoints in their published format, if it differs from `transformers` 5."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5EncoderModel

from attnlens_model import CheckpointError, ConfigError, EncoderConfig, load_checkpoint, read_config
from odd_models import OddModel, random_inputs

# Each: the model, and its config.json with the keys that the publisher used.
NOMIC = (
    OddModel("NomicBert", {"layer_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 500.0}}, std=0.1),
    {
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "attn_pdrop": 0.0,
        "causal": False,
        "layer_norm_epsilon": 1e-5,
        "max_trained_positions": 48,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "n_embd": 96,
        "n_head": 3,
        "n_inner": 160,
        "n_layer": 3,
        "n_positions": 64,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "resid_pdrop": 0.0,
        "rotary_emb_base": 500,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": 2,
        "use_rms_norm": False,
        "vocab_size": 300,
    },
)
EXPERTS = {"num_experts": 8, "moe_every_n_layers": 2, "moe_top_k": 2}
GELU = {"activation_function": "gelu"}
GTE = (
    OddModel(
        "Gte",
        {"pad_token_id": 0, "type_vocab_size": 2, "rope_parameters": {"rope_theta": 700.0}},
        std=0.1,
    ),
    {
        "model_type": "new",
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 96,
        "intermediate_size": 160,
        "layer_norm_eps": 1e-12,
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "max_position_embeddings": 64,
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_scaling": None,
        "rope_theta": 700,
        "type_vocab_size": 2,
        "vocab_size": 300,
    },
)
MODERNBERT = (
    OddModel(
        "ModernBert",
        {"pad_token_id": 5, "global_attn_every_n_layers": 2, "local_attention": 10}
        | {"global_rope_theta": 900.0, "local_rope_theta": 300.0},
        std=0.1,
    ),
    {
        "model_type": "modernbert",
        "attention_bias": False,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 900.0,
        "hidden_activation": "gelu",
        "hidden_size": 96,
        "intermediate_size": 160,
        "layer_norm_eps": 1e-05,
        "local_attention": 10,
        "local_rope_theta": 300.0,
        "max_position_embeddings": 64,
        "norm_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "pad_token_id": 5,
        "position_embedding_type": "absolute",
        "vocab_size": 300,
    },
)
PUBLISHED: list[tuple[OddModel, dict[str, Any]]] = [NOMIC, GTE, MODERNBERT]


@pytest.mark.parametrize(("odd", "config"), PUBLISHED, ids=["nomic", "gte", "modernbert"])
def test_published_checkpoint_matches_transformers(
    odd: OddModel, config: dict[str, Any], tmp_path: Path
) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    expected = read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config == expected
    inputs = random_inputs(model.config, torch.ones(2, 33, dtype=torch.int64))
    with torch.no_grad():
        found = checkpoint.encoder(**inputs).last_hidden_state
        assert (found - model(**inputs).last_hidden_state).abs().max() < 1e-5


@pytest.mark.parametrize("fused", [False, True])
def test_fused_and_separate_projections_are_found(fused: bool, tmp_path: Path) -> None:
    model = GTE[0].make()
    model.save_pretrained(tmp_path)
    expected = load_checkpoint(tmp_path).encoder.state_dict()
    if not fused:
        (tmp_path / "model.safetensors").unlink()
        tensors = model.state_dict()
        assert "layers.2.mlp.gate_proj.weight" in tensors
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = load_checkpoint(tmp_path).encoder.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fused_tensor_of_another_size_is_named_with_both_shapes(tmp_path: Path) -> None:
    MODERNBERT[0].make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 150}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.Wi.weight \(320, 96\) instead of \(300, 96\)"):
        load_checkpoint(tmp_path)


def test_absent_fused_tensor_is_named_once(tmp_path: Path) -> None:
    model = MODERNBERT[0].make()
    model.config.save_pretrained(tmp_path)
    tensors = model.state_dict()
    del tensors["layers.1.attn.Wqkv.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"1 missing: layers\.1\.attn\.Wqkv\.weight; check"):
        load_checkpoint(tmp_path)


def test_older_t5_files_with_the_embeddings_twice_are_read(tmp_path: Path) -> None:
    model = OddModel("T5", {"d_ff": 160}, kind="ForConditionalGeneration", std=0.05).make()
    model.config.save_pretrained(tmp_path)
    tensors = model.state_dict()
    assert {"shared.weight", "encoder.embed_tokens.weight"} <= set(tensors)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    checkpoint = load_checkpoint(tmp_path)
    assert torch.equal(checkpoint.encoder.state_dict()["embeddings.token.weight"], tensors["shared.weight"])
    assert "decoder.embed_tokens.weight" in checkpoint.unused_tensors


# What transformers writes beside it, and goes by; with the name of the feed-forward that it did not change.
@pytest.mark.parametrize("stated", [{"dense_act_fn": "silu"}, {"dense_act_fn": "gelu", "is_gated_act": True}])
def test_parts_of_a_t5_feed_forward_outweigh_its_name(stated: dict[str, Any], tmp_path: Path) -> None:
    gated = "is_gated_act" in stated
    name = "gated-gelu" if gated else "relu"
    OddModel(
        "T5", {"d_ff": 160, "feed_forward_proj": name}, kind="EncoderModel", std=0.05
    ).make().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"feed_forward_proj": "relu"} | stated
    (tmp_path / "config.json").write_text(json.dumps(content))
    model: Any = T5EncoderModel.from_pretrained(tmp_path)
    model.eval()
    inputs = random_inputs(model.config, torch.ones(2, 9, dtype=torch.int64))
    with torch.no_grad():
        found = load_checkpoint(tmp_path).encoder(**inputs).last_hidden_state
        assert (found - model(**inputs).last_hidden_state).abs().max() < 1e-4


def test_gate_that_the_weights_lack_is_named(tmp_path: Path) -> None:
    OddModel("T5", {"d_ff": 160}, kind="EncoderModel").make().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"is_gated_act": True}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"requires layers\.0\.feed_forward\.gate\.weight.* the t5 family"
    ):
        load_checkpoint(tmp_path)


def test_fixed_scaling_of_gte_is_read() -> None:
    """The published code: base * factor, and every frequency over factor^(2/K)."""
    config = EncoderConfig.from_dict(GTE[1] | {"rope_scaling": {"type": "ntk", "factor": 8.0}})
    values = config.by_path()
    assert values["attention.rotary.theta"] == pytest.approx(5600.0)
    assert values["attention.rotary.divisor"] == pytest.approx(8.0 ** (2 / 32))
    # The rotation is the same in a form supported by transformers.
    assert EncoderConfig.from_dict(config.to_hugging_face()) == config


def test_batch_dependent_scaling_is_limited_to_the_trained_length() -> None:
    config = EncoderConfig.from_dict(NOMIC[1] | {"rotary_scaling_factor": 2})
    assert config.max_tokens == 48
    assert config.by_path()["attention.rotary.theta"] == 500.0
    assert EncoderConfig.from_dict(NOMIC[1]).max_tokens == 64


def test_list_of_layer_kinds_and_a_step_say_the_same() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert EncoderConfig.from_dict(MODERNBERT[1]) == EncoderConfig.from_dict(
        MODERNBERT[1] | {"layer_types": kinds, "global_attn_every_n_layers": 3}
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BERT = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 160,
    "pad_token_id": 1,
    "max_position_embeddings": 64,
}
ROFORMER = BERT | {"model_type": "roformer"}
DEBERTA = BERT | {"model_type": "deberta", "relative_attention": True, "pos_att_type": "c2p|p2c"}
T5 = {"model_type": "t5", "vocab_size": 300, "d_model": 96, "num_layers": 2, "num_heads": 3, "d_ff": 160}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            NOMIC[1] | EXPERTS,
            "activation_function='swiglu' is not supported with experts: only 'gelu'",
        ),
        (
            NOMIC[1] | EXPERTS | {"moe_every_n_layers": 1},
            "moe_every_n_layers=1 is not supported: .* at least 2",
        ),
        (
            NOMIC[1] | EXPERTS | {"moe_normalize_expert_weights": True},
            "moe_normalize_expert_weights=True is not",
        ),
        (NOMIC[1] | EXPERTS | {"expert_choice_router": True}, "expert_choice_router=True is not supported"),
        (NOMIC[1] | EXPERTS | {"num_shared_experts": 1}, "num_shared_experts=1 is not supported: only 0 is"),
        (NOMIC[1] | EXPERTS | {"ffn_div": 2}, "ffn_div=2 is not supported: only 1 is"),
        (NOMIC[1] | EXPERTS | GELU | {"moe_top_k": 9}, r"num_selected=9: must be from 1 to num_experts=8"),
        (
            {key: value for key, value in (NOMIC[1] | EXPERTS | GELU).items() if key != "moe_top_k"},
            "not specify moe_top_k",
        ),
        (
            NOMIC[1] | EXPERTS | GELU | {"rope_theta": 777.0},
            "reads rotary_emb_base alone, and another key in config.json contradicts it",
        ),
        (
            BERT | {"model_type": "splinter", "is_decoder": True},
            "transformers ignores for splinter: remove it",
        ),
        (
            BERT | {"model_type": "bert", "position_embedding_type": "alibi", "is_decoder": True},
            "is_decoder=True is not supported: only False is",
        ),
        (NOMIC[1] | EXPERTS | GELU | {"num_experts": "8"}, r"num_experts='8' is str: it must be int"),
        (NOMIC[1] | {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction=0.5 is not supported"),
        (NOMIC[1] | {"rotary_emb_interleaved": True}, "rotary_emb_interleaved=True is not"),
        (NOMIC[1] | {"rotary_head_dim": True}, "rotary_head_dim=True is not supported"),
        (NOMIC[1] | {"prenorm": True}, "prenorm=True is not supported: only False is"),
        (NOMIC[1] | {"causal": True}, "causal=True is not supported"),
        (
            NOMIC[1] | {"activation_function": "relu"},
            "activation_function='relu' is not.*swiglu, geglu, gelu",
        ),
        ({key: NOMIC[1][key] for key in NOMIC[1] if key != "rotary_emb_base"}, "not specify rotary_emb_base"),
        (
            {key: NOMIC[1][key] for key in NOMIC[1] if key != "rotary_emb_fraction"},
            "rotary_emb_fraction=None",
        ),
        (GTE[1] | {"position_embedding_type": "absolute"}, "position_embedding_type='absolute' is not"),
        (GTE[1] | {"logn_attention_scale": True}, "logn_attention_scale=True is not supported"),
        (GTE[1] | {"layer_norm_type": "rms_norm"}, "layer_norm_type='rms_norm' is not supported"),
        (
            GTE[1] | {"rope_scaling": {"type": "yarn"}},
            "rope_type='yarn' is not.*linear, dynamic, llama3, ntk",
        ),
        (GTE[1] | {"rope_scaling": {"type": "ntk"}}, "factor=None must be a number greater than 0"),
        (GTE[1] | {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "mixed_b=0.6 is not"),
        (GTE[1] | {"rope_scaling": "ntk"}, "rope_scaling='ntk' must be an object"),
        (
            MODERNBERT[1] | {"rope_parameters": {"full_attention": YARN}},
            r"rope_type='yarn' is not supported: .*default, linear, dynamic, llama3\.",
        ),
        (GTE[1] | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (GTE[1] | {"rope_theta": "big"}, "rope_theta='big' must be a number"),
        (ROFORMER | {"rotary_value": True}, "rotary_value=True is not supported: only False is"),
        (ROFORMER | {"num_attention_heads": 32}, "must be null for the odd head size 3"),
        (MODERNBERT[1] | {"layer_types": ["full_attention"] * 2}, "layer_types=.* is not supported: it .* 3"),
        (MODERNBERT[1] | {"layer_types": ["chunked_attention"] * 3}, "layer_types=.* is not supported: it"),
        (MODERNBERT[1] | {"local_attention": 1}, "local_attention=1 is not supported"),
        (MODERNBERT[1] | {"sliding_window": 10}, "sliding_window=10 contradicts local_attention=10: .*, 5"),
        (MODERNBERT[1] | {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers=0 must be"),
        (T5 | {"feed_forward_proj": "gated-tanh"}, "dense_act_fn='tanh' is not supported"),
        (T5 | {"is_decoder": True}, "is_decoder=True is not supported"),
        (T5 | {"model_type": "umt5", "d_kv": 20, "head_dim": 32}, "d_kv=20 contradicts head_dim=32"),
        (DEBERTA | {"talking_head": True}, "talking_head=True is not supported: only False is"),
        (DEBERTA | {"pos_att_type": "c2p|p2p"}, "pos_att_type='c2p|p2p' is not supported: only c2p, p2c"),
        (DEBERTA | {"relative_attention": False}, "with relative_attention=False is not supported"),
        (T5 | {"num_hidden_layers": 3}, "num_layers=2 contradicts num_hidden_layers=3: .*remove the other"),
        (T5 | {"hidden_size": 48}, "d_model=96 contradicts hidden_size=48"),
        (T5 | {"num_attention_heads": 4}, "num_heads=3 contradicts num_attention_heads=4"),
        (T5 | {"head_dim": 32}, "d_kv=64 contradicts head_dim=32"),
    ],
    ids=str,
)
def test_unsupported_feature_is_rejected_by_name(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(content)


def test_padding_id_and_feed_forward_depend_on_the_model_type() -> None:
    assert EncoderConfig.from_dict(T5).layer_feed_forwards[0].kind == "plain"
    multilingual = EncoderConfig.from_dict(T5 | {"model_type": "mt5"})
    feed_forward = multilingual.layer_feed_forwards[0]
    assert (feed_forward.kind, feed_forward.activation) == ("gated", "gelu_tanh")
    assert multilingual.by_path()["attention.head_size"] == 64
    assert multilingual.by_path()["attention.scale"] == 1.0
    assert EncoderConfig.from_dict(GTE[1]).embeddings.pad_token_id == 0
    assert EncoderConfig.from_dict(GTE[1] | {"model_type": "gte"}).embeddings.pad_token_id == 1
