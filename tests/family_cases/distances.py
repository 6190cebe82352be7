"""Families with relative positions."""

from typing import Any

from family_cases.cases import FamilyCases
from odd_models import OddModel

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
UMT5 = [
    OddModel("UMT5", T5_SIZES | {"d_kv": 20}, **T5_SHAPE),
    OddModel(
        "UMT5",
        T5_SIZES
        | {"d_kv": 32, "feed_forward_proj": "relu", "layer_norm_epsilon": 1e-2, "num_attention_heads": 4}
        | {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 50},
        138,
        **T5_SHAPE,
    ),
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
# Version 1; the second has distances beyond the last, on both sides.
DEBERTA_V1 = {"relative_attention": True, "pos_att_type": "c2p|p2c", "position_biased_input": False}
DEBERTA1 = [
    OddModel("Deberta", DEBERTA_V1, 64),
    OddModel("Deberta", DEBERTA_V1 | {"max_relative_positions": 12, "type_vocab_size": 2, "pad_token_id": 7}),
    OddModel(
        "Deberta", DEBERTA_V1 | {"pos_att_type": ["p2c"], "embedding_size": 40, "num_attention_heads": 6}
    ),
    OddModel("Deberta", DEBERTA_V1 | {"pos_att_type": "c2p", "position_biased_input": True}, 1),
    OddModel("Deberta", {"hidden_act": "relu", "num_attention_heads": 1, "layer_norm_eps": 1e-3}),
]

CASES = FamilyCases(
    models=[*MPNET, *T5, *UMT5, *DEBERTA, *DEBERTA1],
    traced=[],
    one_of_each=[
        *(MPNET[0], T5[0], T5[1], UMT5[0], UMT5[1], DEBERTA[0], DEBERTA[4], DEBERTA[5], DEBERTA[7]),
        *(DEBERTA1[0], DEBERTA1[2], DEBERTA1[4]),
    ],
    heads=[
        (DEBERTA[0], "ForMaskedLM", {"cls.predictions.bias"}),
        (DEBERTA[4], "ForTokenClassification", {"classifier.weight"}),
        (MPNET[0], "ForMaskedLM", {"lm_head.dense.weight"}),
        (T5[0], "ForConditionalGeneration", {"decoder.final_layer_norm.weight"}),
        (DEBERTA1[1], "ForMaskedLM", {"cls.predictions.bias"}),
        (UMT5[0], "ForConditionalGeneration", {"decoder.final_layer_norm.weight"}),
        (T5[1], "ForSequenceClassification", {"classification_head.dense.weight"}),
    ],
    exported={
        "mpnet": OddModel("MPNet", {"max_position_embeddings": 132, "num_hidden_layers": 2}, 130),
        # The last bucket begins at 18; no one published model has both the convolution and token types.
        "deberta_v2": OddModel(
            "DebertaV2",
            {
                "relative_attention": True,
                "pos_att_type": "p2c|c2p",
                "share_att_key": True,
                "position_buckets": 8,
            }
            | {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "max_relative_positions": 24}
            | {"conv_kernel_size": 3, "type_vocab_size": 2, "num_hidden_layers": 2, "embedding_size": 40},
        ),
        "t5": OddModel(
            "T5",
            {
                "num_hidden_layers": 2,
                "d_kv": 20,
                "d_ff": 160,
                "n_positions": 132,
                "feed_forward_proj": "gated-gelu",
            },
            130,
            kind="EncoderModel",
            std=0.05,
        ),
        "umt5": OddModel(
            "UMT5",
            {"num_hidden_layers": 1, "d_kv": 20, "d_ff": 160, "n_positions": 132},
            130,
            kind="EncoderModel",
            std=0.05,
        ),
        "deberta": OddModel("Deberta", DEBERTA_V1 | {"max_relative_positions": 12, "num_hidden_layers": 1}),
    },
    operators={
        "mpnet": {"CumSum"},
        "deberta_v2": {"Conv"},
        "t5": {"ReduceSum", "Sqrt"},
        "umt5": {"ReduceSum", "Sqrt"},
    },
)
