"""Families that turn queries and keys by their positions."""

from typing import Any

from family_cases.cases import FamilyCases
from odd_models import OddModel

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
JINA_V3 = [
    OddModel("JinaEmbeddingsV3", std=0.1),
    OddModel(
        "JinaEmbeddingsV3",
        {"num_attention_heads": 6, "type_vocab_size": 2, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
        | {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        64,
        std=0.1,
    ),
]

ROFORMER = [
    OddModel("RoFormer", {"num_attention_heads": 4}),
    OddModel("RoFormer", {"embedding_size": 40, "type_vocab_size": 1, "layer_norm_eps": 1e-3}, 64),
    OddModel("RoFormer", {"is_decoder": True, "hidden_act": "relu", "num_attention_heads": 6}, 17),
]
# A window of 7 shows 7 tokens on each side: inputs on both sides of that.
ULTRA_SIZES: dict[str, Any] = {"pad_token_id": 0, "num_attention_heads": 6}
ULTRABERT = [
    OddModel("Ultrabert", ULTRA_SIZES | {"sliding_window": 7, "num_key_value_heads": 2}, 33, std=0.08),
    *(
        OddModel("Ultrabert", ULTRA_SIZES | {"sliding_window": 7, "num_hidden_layers": 1}, tokens, std=0.08)
        for tokens in (8, 9)
    ),
    OddModel(
        "Ultrabert",
        ULTRA_SIZES
        | {"sliding_window": 5, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}
        | {"head_dim": 20, "hidden_act": "gelu", "layer_types": ["full_attention", "sliding_attention"] * 2}
        | {"num_hidden_layers": 4}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            }
        },
        64,
        std=0.08,
    ),
]

CASES = FamilyCases(
    models=[*MODERNBERT, *NOMIC, *GTE, *ROFORMER, *JINA_V3],
    traced=[*EUROBERT, *ULTRABERT],
    one_of_each=[MODERNBERT[1], NOMIC[0], GTE[0], ROFORMER[0], ROFORMER[1], JINA_V3[0]],
    heads=[
        (MODERNBERT[1], "ForMaskedLM", {"head.dense.weight", "decoder.bias"}),
        (MODERNBERT[2], "ForSequenceClassification", {"head.dense.weight", "classifier.weight"}),
        (NOMIC[0], "ForMaskedLM", {"cls.predictions.transform.dense.weight"}),
        (GTE[0], "ForMaskedLM", {"lm_head.dense.weight"}),
        (EUROBERT[0], "ForMaskedLM", {"lm_head.weight"}),
        (ULTRABERT[0], "ForMaskedLM", {"head.linear1.weight", "cls.weight"}),
        (ROFORMER[1], "ForMaskedLM", {"cls.predictions.bias"}),
        (EUROBERT[0], "ForSequenceClassification", {"classifier.weight"}),
        (JINA_V3[0], "ForMaskedLM", {"lm_head.dense.weight"}),
    ],
    exported={
        "modernbert": OddModel(
            "ModernBert", {"pad_token_id": 0, "num_hidden_layers": 2, "local_attention": 16}, std=0.1
        ),
        "nomic_bert": OddModel("NomicBert", {"num_hidden_layers": 1}, std=0.1),
        "gte": OddModel("Gte", {"pad_token_id": 1, "num_hidden_layers": 1}, std=0.1),
        "jina_v3": OddModel("JinaEmbeddingsV3", {"num_hidden_layers": 1}, std=0.1),
        "eurobert": OddModel(
            "EuroBert",
            {"pad_token_id": 2, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2},
            std=0.1,
        ),
        "roformer": OddModel("RoFormer", {"num_hidden_layers": 1, "embedding_size": 40}),
        "ultrabert": OddModel(
            "Ultrabert",
            ULTRA_SIZES
            | {"num_hidden_layers": 2, "num_key_value_heads": 2, "sliding_window": 7}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            std=0.08,
        ),
    },
    operators={
        "roformer": {"Concat"},
        "modernbert": {"Abs", "Clip", "Concat"},
        "nomic_bert": {"Concat", "Sigmoid"},
        "gte": {"Concat"},
        "jina_v3": {"Concat"},
    },
)
