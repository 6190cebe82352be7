"""Language models that serve as encoders."""

from typing import Any

from family_cases.cases import FamilyCases
from odd_models import OddModel

# A cache of keys and values would change nothing but time.
SIZES: dict[str, Any] = {"pad_token_id": 0, "num_attention_heads": 6, "use_cache": False}
SHAPE: dict[str, Any] = {"std": 0.08}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
LLAMA = [
    OddModel(
        "Llama",
        SIZES
        | {"num_key_value_heads": 2, "head_dim": 20, "attention_bias": True, "mlp_bias": True}
        | {"hidden_act": "gelu_new", "rms_norm_eps": 1e-2, "pad_token_id": 299, "rope_parameters": LLAMA3},
        64,
        **SHAPE,
    ),
    OddModel("Llama", SIZES | {"num_key_value_heads": 1, "is_causal": False}, 33, **SHAPE),
]
# A causal window of 9 reaches 8 tokens back: on both sides of that, and where no token is out of reach.
MISTRAL_SIZES = SIZES | {"num_key_value_heads": 3, "num_hidden_layers": 2}
MISTRAL = [
    *(
        OddModel("Mistral", MISTRAL_SIZES | {"sliding_window": 9}, num_tokens, **SHAPE)
        for num_tokens in (8, 9, 10)
    ),
    OddModel("Mistral", MISTRAL_SIZES | {"sliding_window": None, "head_dim": 24}, 64, **SHAPE),
    OddModel("Mistral", MISTRAL_SIZES | {"sliding_window": 5, "is_causal": False}, 17, **SHAPE),
]
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
QWEN2 = [
    OddModel("Qwen2", SIZES | WINDOW | {"num_key_value_heads": 6, "max_window_layers": 1}, **SHAPE),
    OddModel("Qwen2", SIZES | {"num_key_value_heads": 1, "is_causal": False}, 17, **SHAPE),
    OddModel(
        "Qwen2",
        SIZES
        | {"num_key_value_heads": 3, "use_sliding_window": True, "sliding_window": 6, "is_causal": False}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        **SHAPE,
    ),
]
QWEN3 = [
    OddModel(
        "Qwen3",
        SIZES
        | WINDOW
        | {"num_key_value_heads": 6, "head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-3}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
        **SHAPE,
    ),
    OddModel("Qwen3", SIZES | {"num_key_value_heads": 1, "head_dim": 32, "is_causal": False}, 9, **SHAPE),
]
# With use_bidirectional_attention a window of 16 or 17 reaches 8 tokens on each side.
GEMMA_SIZES = SIZES | {"num_key_value_heads": 2, "head_dim": 20, "query_pre_attn_scalar": 24}
SEES_ALL = {"use_bidirectional_attention": True}
GEMMA3 = [
    OddModel(
        "Gemma3Text", GEMMA_SIZES | SEES_ALL | {"sliding_window": 16, "num_hidden_layers": 7}, 33, std=0.05
    ),
    *(
        OddModel(
            "Gemma3Text", GEMMA_SIZES | SEES_ALL | {"sliding_window": size, "num_hidden_layers": 1}, tokens
        )
        for size, tokens in ((16, 9), (16, 10), (17, 10), (18, 10))
    ),
    OddModel(
        "Gemma3Text",
        SIZES
        | {"num_key_value_heads": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "attention_bias": True}
        | {"sliding_window": 9, "rms_norm_eps": 1e-3, "hidden_activation": "silu", "pad_token_id": 7}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            }
        },
        **SHAPE,
    ),
    OddModel("Gemma3Text", GEMMA_SIZES | {"sliding_window": 7, "is_causal": False}, 17, **SHAPE),
    OddModel("Gemma3Text", GEMMA_SIZES | SEES_ALL | {"sliding_window": 6, "is_causal": False}, 17, **SHAPE),
]
# A window of 8 reaches 8 tokens on each side.
GEMMA2_SIZES = SIZES | {"num_attention_heads": 4, "head_dim": 8, "hidden_size_per_layer_input": 20}
GEMMA2_SIZES |= {"global_head_dim": 12, "embedding_dim": 72}
EMBEDDING_GEMMA2 = [
    OddModel(
        "EmbeddingGemma2Text", GEMMA2_SIZES | {"sliding_window": 8, "sliding_window_pattern": 2}, 33, std=0.05
    ),
    *(
        OddModel(
            "EmbeddingGemma2Text",
            GEMMA2_SIZES
            | {"sliding_window": 8, "num_hidden_layers": 2}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            tokens,
            std=0.05,
        )
        for tokens in (1, 9, 10)
    ),
    OddModel(
        "EmbeddingGemma2Text",
        GEMMA2_SIZES
        | {"num_key_value_heads": 4, "attention_bias": True, "hidden_activation": "silu", "pad_token_id": 7}
        | {"sliding_window": 5, "rms_norm_eps": 1e-3, "per_layer_config": {}}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            }
        },
        std=0.05,
    ),
    OddModel(
        "EmbeddingGemma2Text",
        GEMMA2_SIZES
        | {"num_key_value_heads": 1, "hidden_activation": "gelu", "sliding_window": 3}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {
            "per_layer_config": {
                "0": {"head_dim": 6},
                "01": {"num_key_value_heads": 2},
                "2": {"num_key_value_heads": 2},
            }
        },
        std=0.05,
    ),
]
# The intermediate size defaults to 4 * n_embd. Published files have no padding id.
GPT2_SIZES = {"pad_token_id": 0, "use_cache": False, "n_inner": 160}
GPT2 = [
    OddModel("GPT2", GPT2_SIZES, **SHAPE),
    OddModel(
        "GPT2",
        GPT2_SIZES
        | {"n_inner": None, "num_attention_heads": 6, "activation_function": "relu", "pad_token_id": 299}
        | {"layer_norm_epsilon": 1e-2, "reorder_and_upcast_attn": True},
        64,
        **SHAPE,
    ),
    OddModel("GPT2", GPT2_SIZES | {"is_causal": False, "embd_pdrop": 0.3, "resid_pdrop": 0.2}, 33, **SHAPE),
    OddModel("GPT2", GPT2_SIZES | {"num_hidden_layers": 1, "num_attention_heads": 1}, 1, **SHAPE),
]

ONE_LAYER = {"num_hidden_layers": 1, "num_key_value_heads": 2}

CASES = FamilyCases(
    models=GPT2,
    traced=[*LLAMA, *MISTRAL, *QWEN2, *QWEN3, *GEMMA3, *EMBEDDING_GEMMA2],
    one_of_each=[GPT2[0]],
    heads=[
        (LLAMA[0], "ForCausalLM", {"lm_head.weight"}),
        (MISTRAL[0], "ForSequenceClassification", {"score.weight"}),
        (QWEN2[0], "ForTokenClassification", {"score.weight"}),
        (QWEN3[0], "ForCausalLM", {"lm_head.weight"}),
        (GEMMA3[0], "ForSequenceClassification", {"score.weight"}),
        (GPT2[0], "LMHeadModel", set()),
        (GPT2[1], "ForTokenClassification", {"classifier.weight"}),
        (GPT2[2], "DoubleHeadsModel", {"multiple_choice_head.summary.weight"}),
    ],
    exported={
        "gpt2": OddModel("GPT2", GPT2_SIZES | {"num_hidden_layers": 1}, **SHAPE),
        "llama": OddModel("Llama", SIZES | ONE_LAYER | {"rope_parameters": LLAMA3}, **SHAPE),
        "mistral": OddModel("Mistral", SIZES | ONE_LAYER | {"sliding_window": 9}, **SHAPE),
        "qwen2": OddModel("Qwen2", SIZES | ONE_LAYER, **SHAPE),
        "qwen3": OddModel("Qwen3", SIZES | ONE_LAYER | {"head_dim": 20}, **SHAPE),
        "gemma3_text": OddModel(
            "Gemma3Text",
            GEMMA_SIZES
            | SEES_ALL
            | {"num_hidden_layers": 2, "num_key_value_heads": 2, "sliding_window": 16}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            **SHAPE,
        ),
        "embedding_gemma2": OddModel(
            "EmbeddingGemma2Text",
            GEMMA2_SIZES
            | {"sliding_window": 8, "num_hidden_layers": 2}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            **SHAPE,
        ),
    },
    operators={"gpt2": {"Clip"}},
)
