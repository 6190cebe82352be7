"""Families of which `transformers` has no class: see `oracles`."""

from family_cases.cases import FamilyCases
from odd_models import OddModel
from oracles import jina_bert, nomic_bert

JINA = [
    OddModel("JinaBert", {"feed_forward_type": "geglu"}, std=0.1, source=jina_bert),
    OddModel(
        "JinaBert",
        {"feed_forward_type": "reglu", "num_attention_heads": 8, "layer_norm_eps": 1e-5, "pad_token_id": 7},
        64,
        std=0.1,
        source=jina_bert,
    ),
    OddModel(
        "JinaBert",
        {"hidden_act": "gelu_new", "num_attention_heads": 12, "type_vocab_size": 1},
        33,
        std=0.1,
        source=jina_bert,
    ),
    OddModel(
        "JinaBert", {"feed_forward_type": "geglu", "num_attention_heads": 1}, 1, std=0.1, source=jina_bert
    ),
]
JINA_CODE = [
    OddModel(
        "JinaBertCode", {"feed_forward_type": "geglu", "layer_norm_eps": 1e-3}, std=0.1, source=jina_bert
    ),
    OddModel("JinaBertCode", {"hidden_act": "relu", "num_attention_heads": 6}, 64, std=0.1, source=jina_bert),
]
NOMIC_EXPERTS = [
    OddModel("NomicBert", {"num_hidden_layers": 4}, std=0.1, source=nomic_bert),
    OddModel(
        "NomicBert",
        {"moe_every_n_layers": 3, "num_experts": 4, "moe_top_k": 3, "num_attention_heads": 6}
        | {"num_hidden_layers": 5, "rotary_emb_base": 77.0, "type_vocab_size": 2},
        64,
        std=0.1,
        source=nomic_bert,
    ),
    OddModel(
        "NomicBert",
        {"moe_top_k": 1, "qkv_proj_bias": False, "mlp_fc1_bias": False, "type_vocab_size": 0},
        17,
        std=0.1,
        source=nomic_bert,
    ),
    OddModel("NomicBert", {"moe_every_n_layers": 0, "pad_token_id": 0}, 33, std=0.1, source=nomic_bert),
]

CASES = FamilyCases(
    models=[*JINA, *JINA_CODE, *NOMIC_EXPERTS],
    traced=[],
    one_of_each=[JINA[0], JINA[2], *JINA_CODE, NOMIC_EXPERTS[0]],
    exported={
        "jina_bert": OddModel(
            "JinaBert", {"feed_forward_type": "geglu", "num_hidden_layers": 1}, std=0.1, source=jina_bert
        ),
        "nomic_bert with experts": OddModel(
            "NomicBert", {"num_hidden_layers": 2}, std=0.1, source=nomic_bert
        ),
    },
    operators={
        "jina_bert": {"Abs"},
        "nomic_bert with experts": {"Abs", "ArgMax", "Clip", "Concat"},
    },
)
