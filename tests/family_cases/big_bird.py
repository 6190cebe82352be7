"""BigBird where it attends fully; its blocks are compared in test_big_bird.py."""

from family_cases.cases import FamilyCases
from odd_models import OddModel

FULL = {"attention_type": "original_full"}
BIG_BIRD = [
    OddModel("BigBird", FULL),
    OddModel(
        "BigBird",
        FULL | {"hidden_act": "gelu", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "pad_token_id": 5},
        64,
    ),
]

CASES = FamilyCases(
    models=BIG_BIRD,
    traced=[],
    one_of_each=[BIG_BIRD[0]],
    heads=[(BIG_BIRD[0], "ForMaskedLM", {"cls.predictions.bias"})],
)
