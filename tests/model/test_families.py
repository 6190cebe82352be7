"""Every family against the model of `transformers` that publishes it: hidden states and attention maps."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from attnlens_model import Encoder, EncoderConfig, load_checkpoint, read_config
from attnlens_model.families import FAMILIES
from odd_models import OddModel, float64_throughout, padded_masks, random_inputs

ROBERTA = [
    OddModel("Roberta", {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": 66}, 64),
    OddModel("Roberta", {"pad_token_id": 7, "hidden_act": "gelu_new", "type_vocab_size": 2}),
    OddModel("Roberta", {"is_decoder": True, "pad_token_id": 0, "layer_norm_eps": 1e-3}),
    OddModel("XLMRoberta", {"hidden_act": "relu", "type_vocab_size": 1, "num_hidden_layers": 5}, 33),
    OddModel("Camembert", {"num_attention_heads": 1, "num_hidden_layers": 2, "type_vocab_size": 1}, 1),
]
DISTIL_SIZES = {"dim": 96, "n_layers": 3, "n_heads": 3, "hidden_dim": 160}
DISTILBERT = [
    OddModel("DistilBert", DISTIL_SIZES),
    OddModel("DistilBert", DISTIL_SIZES | {"activation": "relu", "pad_token_id": 5, "n_layers": 4}, 17),
    OddModel("DistilBert", DISTIL_SIZES | {"n_heads": 4, "max_position_embeddings": 33}, 33),
]
# Buckets begin at the distances 8, 12, 16, 23, 32, 46, 64 and 91; the last has no end.
MPNET = [
    OddModel("MPNet", {"layer_norm_eps": 1e-5}, 62),
    OddModel("MPNet", {"hidden_act": "relu", "num_attention_heads": 1}, 2),
    *(OddModel("MPNet", {"num_hidden_layers": 2}, num_tokens) for num_tokens in (1, 15, 16, 17)),
    *(
        OddModel("MPNet", {"max_position_embeddings": 140, "num_hidden_layers": 2}, num_tokens)
        for num_tokens in (127, 130, 138)
    ),
]
ELECTRA = [
    OddModel("Electra", {"embedding_size": 40}),
    OddModel("Electra", {"embedding_size": 96, "layer_norm_eps": 1e-5, "type_vocab_size": 3}),
    OddModel("Electra", {"embedding_size": 120, "hidden_act": "gelu_new", "is_decoder": True}, 64),
]
ALBERT = [
    OddModel("Albert", {"embedding_size": 40, "num_hidden_layers": 5}),
    OddModel("Albert", {"embedding_size": 96, "num_hidden_layers": 6, "num_hidden_groups": 3}, 64),
    OddModel("Albert", {"embedding_size": 20, "hidden_act": "gelu", "layer_norm_eps": 1e-5}, 1),
]
# Windows of local_attention // 2 places on each side, and lengths below, just above and far above them.
MODERN_SIZES = {"pad_token_id": 0, "num_hidden_layers": 5}
MODERNBERT = [
    OddModel("ModernBert", MODERN_SIZES | {"local_attention": 16, "norm_eps": 1e-3}, std=0.1),
    OddModel(
        "ModernBert",
        MODERN_SIZES
        | {
            "local_attention": 7,
            "global_attn_every_n_layers": 2,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_activation": "silu",
            "global_rope_theta": 500.0,
            "local_rope_theta": 3000.0,
        },
        64,
        std=0.1,
    ),
    OddModel("ModernBert", MODERN_SIZES | {"local_attention": 128, "pad_token_id": 299}, 9, std=0.1),
    *(
        OddModel(
            "ModernBert", MODERN_SIZES | {"local_attention": 16, "num_hidden_layers": 2}, num_tokens, std=0.1
        )
        for num_tokens in (8, 9, 10)
    ),
    OddModel("ModernBert", MODERN_SIZES | {"local_attention": 2, "global_attn_every_n_layers": 1}, 1),
    OddModel(
        "ModernBert",
        MODERN_SIZES
        | {
            "num_hidden_layers": 3,
            "local_attention": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 900.0},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 70.0, "factor": 2.0},
            },
        },
        std=0.1,
    ),
]
NOMIC = [
    OddModel("NomicBert", {"num_attention_heads": 4}, std=0.1),
    OddModel(
        "NomicBert",
        {"head_dim": 20, "type_vocab_size": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        64,
        std=0.1,
    ),
]
GTE = [
    OddModel("Gte", {"pad_token_id": 1, "type_vocab_size": 2}, std=0.1),
    OddModel("Gte", {"type_vocab_size": 0, "num_attention_heads": 6, "pad_token_id": 0}, 64, std=0.1),
    OddModel(
        "Gte",
        {"hidden_act": "relu", "layer_norm_eps": 1e-3}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.5}},
        33,
        std=0.1,
    ),
]
EURO_SIZES = {"pad_token_id": 2, "num_attention_heads": 6}
EUROBERT = [
    OddModel("EuroBert", EURO_SIZES, std=0.1),
    OddModel("EuroBert", EURO_SIZES | {"num_key_value_heads": 2, "rms_norm_eps": 1e-2}, 64, std=0.1),
    OddModel(
        "EuroBert",
        EURO_SIZES
        | {
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 250000.0, "factor": 4.0},
        },
        17,
        std=0.1,
    ),
]
T5_SIZES = {"d_ff": 160, "n_positions": 140}
T5_SHAPE: dict[str, Any] = {"kind": "EncoderModel", "std": 0.05}
T5 = [
    OddModel("T5", T5_SIZES | {"d_kv": 20}, **T5_SHAPE),
    OddModel(
        "T5",
        T5_SIZES
        | {"d_kv": 32, "feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-2, "num_hidden_layers": 2}
        | {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 50},
        138,
        **T5_SHAPE,
    ),
    OddModel("T5", T5_SIZES | {"feed_forward_proj": "gated-silu", "num_attention_heads": 1}, 1, **T5_SHAPE),
    OddModel("MT5", T5_SIZES | {"d_kv": 40, "layer_norm_epsilon": 1e-3}, 17, **T5_SHAPE),
]
# On both sides of the first log bucket and of the last, beyond which all distances are alike.
DEBERTA_V3 = {
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "position_buckets": 8,
}
DEBERTA = [
    OddModel("DebertaV2", DEBERTA_V3, 64),
    *(OddModel("DebertaV2", DEBERTA_V3 | {"num_hidden_layers": 2}, num_tokens) for num_tokens in (1, 5, 6)),
    # Cut at the last bucket, which is reached on one side of the query at 15 and on the other at 16.
    OddModel("DebertaV2", DEBERTA_V3 | {"max_relative_positions": 16, "share_att_key": False}, 40),
    OddModel(
        "DebertaV2",
        DEBERTA_V3
        | {"position_buckets": 9, "pos_att_type": ["c2p"], "share_att_key": False}
        | {"type_vocab_size": 2, "norm_rel_ebd": "none", "embedding_size": 40, "layer_norm_eps": 1e-3},
    ),
    OddModel(
        "DebertaV2",
        DEBERTA_V3
        | {"position_buckets": -1, "max_relative_positions": 12, "pos_att_type": "p2c"}
        | {"position_biased_input": True, "type_vocab_size": 1, "share_att_key": False},
    ),
    OddModel(
        "DebertaV2",
        DEBERTA_V3
        | {"position_buckets": 32, "conv_kernel_size": 3, "conv_act": "gelu", "embedding_size": 120},
    ),
    OddModel(
        "DebertaV2",
        {"conv_kernel_size": 5, "conv_groups": 4, "hidden_act": "relu", "num_attention_heads": 1}
        | {"type_vocab_size": 3, "pad_token_id": 7},
    ),
]
ODD_MODELS = [
    *ROBERTA,
    *DISTILBERT,
    *MPNET,
    *ELECTRA,
    *ALBERT,
    *MODERNBERT,
    *NOMIC,
    *GTE,
    *EUROBERT,
    *T5,
    *DEBERTA,
]
ONE_OF_EACH = [
    *(ROBERTA[0], DISTILBERT[0], MPNET[0], ELECTRA[0], ALBERT[1]),
    *(MODERNBERT[1], NOMIC[0], GTE[0], EUROBERT[1], T5[0], T5[1]),
    *(DEBERTA[0], DEBERTA[4], DEBERTA[5], DEBERTA[7]),
]
HEADS = [
    (DEBERTA[0], "ForMaskedLM", {"cls.predictions.bias"}),
    (DEBERTA[4], "ForTokenClassification", {"classifier.weight"}),
    (ROBERTA[0], "ForMaskedLM", {"lm_head.bias"}),
    (ROBERTA[3], "ForSequenceClassification", {"classifier.dense.weight"}),
    (DISTILBERT[0], "ForMaskedLM", {"vocab_transform.weight"}),
    (DISTILBERT[1], "ForQuestionAnswering", {"qa_outputs.weight"}),
    (MPNET[0], "ForMaskedLM", {"lm_head.dense.weight"}),
    (ELECTRA[0], "ForPreTraining", {"discriminator_predictions.dense.weight"}),
    (ELECTRA[2], "ForMaskedLM", {"generator_predictions.dense.weight"}),
    (ALBERT[1], "ForMaskedLM", {"predictions.dense.weight"}),
    (MODERNBERT[1], "ForMaskedLM", {"head.dense.weight", "decoder.bias"}),
    (MODERNBERT[2], "ForSequenceClassification", {"head.dense.weight", "classifier.weight"}),
    (NOMIC[0], "ForMaskedLM", {"cls.predictions.transform.dense.weight"}),
    (GTE[0], "ForMaskedLM", {"lm_head.dense.weight"}),
    (EUROBERT[1], "ForMaskedLM", {"lm_head.weight"}),
    (EUROBERT[0], "ForSequenceClassification", {"classifier.weight"}),
    (T5[0], "ForConditionalGeneration", {"decoder.final_layer_norm.weight"}),
    (T5[1], "ForSequenceClassification", {"classification_head.dense.weight"}),
]


def case_id(parameter: object) -> str:
    """Of a set, the same whatever the order of its elements."""
    return " ".join(sorted(parameter)) if isinstance(parameter, set) else str(parameter)


def run(encoder: Encoder, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        output = encoder(**inputs, output_attentions=True)
    return (output.last_hidden_state, *output.attentions)


def largest_differences(encoder: Encoder, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, float]:
    """Of the hidden states and of the attention maps, over live tokens."""
    is_float64 = next(model.parameters()).dtype == torch.float64
    with torch.no_grad(), float64_throughout(model) if is_float64 else nullcontext():
        theirs = model(**inputs, output_attentions=True)
    hidden, *maps = run(encoder, inputs)
    live = inputs["attention_mask"].bool()
    assert len(maps) == len(theirs.attentions) == encoder.config.num_layers
    pairs = zip(maps, theirs.attentions, strict=True)
    return (
        float((hidden - theirs.last_hidden_state)[live].abs().max()),
        max(float((a - b).transpose(1, 2)[live].abs().max()) for a, b in pairs),
    )


@pytest.mark.parametrize("odd", ODD_MODELS, ids=str)
def test_a_random_model_gives_what_transformers_gives(odd: OddModel, tmp_path: Path) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    encoder = load_checkpoint(tmp_path).encoder
    batches = [random_inputs(model.config, mask) for mask in padded_masks(4, odd.num_tokens)]
    worst = [
        max(each) for each in zip(*(largest_differences(encoder, model, b) for b in batches), strict=True)
    ]
    print(f"{odd}: hidden {worst[0]:.2e}, attention {worst[1]:.2e}")  # noqa: T201 - shown by `pytest -rP`
    assert max(worst) < 1e-5
    # Where rounding no longer hides anything.
    encoder.double()
    model.double()
    assert max(max(largest_differences(encoder, model, inputs)) for inputs in batches) < 1e-12


@pytest.mark.parametrize("odd", ODD_MODELS, ids=str)
def test_a_text_gets_the_same_result_alone_and_padded_on_either_side(odd: OddModel, tmp_path: Path) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    encoder = load_checkpoint(tmp_path).encoder
    length = max(1, odd.num_tokens // 2)
    inputs = random_inputs(model.config, torch.ones(1, length, dtype=torch.int64))
    alone = run(encoder, inputs)
    # Absolute positions move with the padding, in the published models too; all others do not.
    sides = [False, True] if encoder.config.positions.scheme != "absolute" else [False]
    for is_left in sides:
        room = (odd.num_tokens - length, 0) if is_left else (0, odd.num_tokens - length)
        padded = run(encoder, {name: nn.functional.pad(each, room) for name, each in inputs.items()})
        place = slice(room[0], room[0] + length)
        assert (padded[0][:, place] - alone[0]).abs().max() < 1e-5
        for wide, narrow in zip(padded[1:], alone[1:], strict=True):
            assert (wide[:, :, place, place] - narrow).abs().max() < 1e-5


@pytest.mark.parametrize(("odd", "head", "unused"), HEADS, ids=case_id)
def test_a_task_model_gives_its_encoder_and_its_head_is_reported(
    odd: OddModel, head: str, unused: set[str], tmp_path: Path
) -> None:
    model = odd.make(head)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert unused <= set(checkpoint.unused_tensors)
    left_out = [name for name in checkpoint.unused_tensors if "decoder" not in name]
    assert not any("encoder" in name or "transformer" in name or "layers" in name for name in left_out)
    inputs = random_inputs(model.config, torch.ones(2, 9, dtype=torch.int64))
    body = model.get_encoder() if "T5" in odd.name else model.base_model
    assert max(largest_differences(checkpoint.encoder, body, inputs)) < 1e-5


@pytest.mark.parametrize("odd", ONE_OF_EACH, ids=str)
def test_the_table_of_a_family_names_every_parameter_once_and_every_prefix_is_found(
    odd: OddModel, tmp_path: Path
) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path / "config.json")
    family = FAMILIES[config.family]
    expected = load_checkpoint(tmp_path).encoder.state_dict()
    for layout in family.layouts:
        tables, theirs = zip(*layout.weight_names(config.num_distinct_layers, expected), strict=True)
        ours = [name for table in tables for name in table]
        assert len(set(ours)) == len(ours)
        assert len(set(theirs)) == len(theirs)
    assert any(
        set(expected)
        <= {name for names, _ in layout.weight_names(config.num_distinct_layers, expected) for name in names}
        for layout in family.layouts
    )
    (tmp_path / "model.safetensors").unlink()
    for prefix in family.prefixes:
        tensors = {prefix + name: tensor for name, tensor in model.state_dict().items()}
        # As older versions saved them.
        tensors |= {prefix + name: torch.arange(64)[None] for name in family.buffers}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        found = load_checkpoint(tmp_path).encoder.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("odd", ODD_MODELS, ids=str)
def test_what_a_config_file_leaves_out_is_what_transformers_takes(odd: OddModel, tmp_path: Path) -> None:
    """`save_pretrained` writes everything; files of older versions only what is not the default."""
    full = json.loads(odd.config().to_json_string(use_diff=False))
    required = [key for key in full if key == "model_type" or key in SIZE_KEYS]
    # Large enough for every family's default padding id.
    sparse = {key: full[key] for key in required} | {"vocab_size": 200_000}
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    assert read_config(tmp_path / "config.json") == EncoderConfig.from_dict(theirs.to_dict())


SIZE_KEYS = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "dim", "n_layers", "n_heads", "hidden_dim"),
    *("d_model", "num_layers", "num_heads", "d_ff", "n_positions"),
}


@pytest.mark.parametrize("odd", ODD_MODELS, ids=str)
def test_a_configuration_survives_both_kinds_of_file(odd: OddModel) -> None:
    config = EncoderConfig.from_dict(odd.config().to_dict())
    assert EncoderConfig.from_json(config.to_json()) == config
    assert EncoderConfig.from_dict(config.to_hugging_face()) == config


@pytest.mark.parametrize("odd", ONE_OF_EACH, ids=str)
def test_half_precision_stays_finite_whatever_is_masked(odd: OddModel, tmp_path: Path) -> None:
    model = odd.make()
    model.save_pretrained(tmp_path)
    encoder = load_checkpoint(tmp_path).encoder.half()
    for mask in padded_masks(3, odd.num_tokens):
        mask[1] = 0
        outputs = run(encoder, random_inputs(model.config, mask))
        assert all(each.isfinite().all() and each.dtype == torch.float16 for each in outputs)
        assert all((weights[1] == 0).all() for weights in outputs[1:])
