"""BERT-like families. BERT itself is compared in test_oracle.py."""

from family_cases.cases import FamilyCases
from odd_models import OddModel

ROBERTA = [
    OddModel("Roberta", {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "max_position_embeddings": 66}, 64),
    OddModel("Roberta", {"pad_token_id": 7, "hidden_act": "gelu_new", "type_vocab_size": 2}),
    OddModel("Roberta", {"is_decoder": True, "pad_token_id": 0, "layer_norm_eps": 1e-3}),
    OddModel("XLMRoberta", {"hidden_act": "relu", "type_vocab_size": 1, "num_hidden_layers": 5}, 33),
    OddModel("Camembert", {"num_attention_heads": 1, "num_hidden_layers": 2, "type_vocab_size": 1}, 1),
]
DISTIL_SIZES = {"dim": 96, "hidden_dim": 160}
DISTILBERT = OddModel("DistilBert", DISTIL_SIZES | {"max_position_embeddings": 33}, 33)
ELECTRA = [
    OddModel("Electra", {"embedding_size": 40}),
    OddModel("Electra", {"embedding_size": 120, "hidden_act": "gelu_new", "is_decoder": True}, 64),
]
ALBERT = [
    OddModel("Albert", {"embedding_size": 96, "num_hidden_layers": 6, "num_hidden_groups": 3}, 64),
]
DATA2VEC = OddModel("Data2VecText", {"pad_token_id": 3, "type_vocab_size": 1})
SPLINTER = OddModel("Splinter", {"layer_norm_eps": 1e-3, "hidden_act": "gelu_new"}, 33)
ERNIE = [
    OddModel("Ernie", {"use_task_id": True, "task_type_vocab_size": 5}),
    OddModel("Ernie", {"use_task_id": True, "task_type_vocab_size": 1, "num_attention_heads": 1}, 1),
]
GENERATION = OddModel("BertGeneration", {"layer_norm_eps": 1e-3, "pad_token_id": 9}, kind="Encoder")
REMBERT_SIZES = {"input_embedding_size": 40, "output_embedding_size": 56}
REMBERT = [
    OddModel("RemBert", REMBERT_SIZES),
    OddModel("RemBert", REMBERT_SIZES | {"input_embedding_size": 96, "is_decoder": True}, 64),
]
MEGATRON = OddModel("MegatronBert", {"type_vocab_size": 3}, 64)
XLM_ROBERTA_XL = [
    OddModel("XLMRobertaXL", {"max_position_embeddings": 66}, 64),
    OddModel("XLMRobertaXL", {"type_vocab_size": 2, "pad_token_id": 4, "layer_norm_eps": 1e-3}, 17),
]
PRELAYERNORM = OddModel("RobertaPreLayerNorm", {"max_position_embeddings": 66}, 64)

CASES = FamilyCases(
    models=[*ROBERTA, DATA2VEC, SPLINTER],
    traced=[
        DISTILBERT,
        *ELECTRA,
        *ALBERT,
        GENERATION,
        *ERNIE,
        *REMBERT,
        MEGATRON,
        *XLM_ROBERTA_XL,
        PRELAYERNORM,
    ],
    one_of_each=[ROBERTA[0], DATA2VEC, SPLINTER],
    heads=[
        (ROBERTA[0], "ForMaskedLM", {"lm_head.bias"}),
        (ROBERTA[3], "ForSequenceClassification", {"classifier.dense.weight"}),
        (DISTILBERT, "ForMaskedLM", {"vocab_transform.weight"}),
        (DISTILBERT, "ForQuestionAnswering", {"qa_outputs.weight"}),
        (ELECTRA[0], "ForPreTraining", {"discriminator_predictions.dense.weight"}),
        (ELECTRA[1], "ForMaskedLM", {"generator_predictions.dense.weight"}),
        (ALBERT[0], "ForMaskedLM", {"predictions.dense.weight"}),
        (DATA2VEC, "ForMaskedLM", {"lm_head.bias"}),
        (SPLINTER, "ForQuestionAnswering", {"splinter_qass.query_start_transform.dense.weight"}),
        (GENERATION, "Decoder", {"lm_head.bias"}),
        (ERNIE[0], "ForMaskedLM", {"cls.predictions.bias"}),
        (REMBERT[0], "ForMaskedLM", {"cls.predictions.dense.weight"}),
        (MEGATRON, "ForMaskedLM", {"cls.predictions.bias"}),
        (XLM_ROBERTA_XL[0], "ForMaskedLM", {"lm_head.bias"}),
        (PRELAYERNORM, "ForSequenceClassification", {"classifier.dense.weight"}),
    ],
    exported={
        "roberta": OddModel(
            "Roberta",
            {
                "type_vocab_size": 1,
                "layer_norm_eps": 1e-5,
                "max_position_embeddings": 66,
                "num_hidden_layers": 1,
            },
            64,
        ),
        "distilbert": OddModel("DistilBert", {"dim": 96, "hidden_dim": 160, "num_hidden_layers": 1}),
        "electra": OddModel("Electra", {"embedding_size": 40, "num_hidden_layers": 1}),
        "albert": OddModel("Albert", {"embedding_size": 40, "num_hidden_groups": 2, "num_hidden_layers": 4}),
        "bert_generation": OddModel("BertGeneration", {"num_hidden_layers": 1}, kind="Encoder"),
        "ernie": OddModel("Ernie", {"use_task_id": True, "num_hidden_layers": 1}),
        "rembert": OddModel("RemBert", REMBERT_SIZES | {"num_hidden_layers": 1}),
        "megatron_bert": OddModel("MegatronBert", {"num_hidden_layers": 1}),
        "xlm_roberta_xl": OddModel("XLMRobertaXL", {"num_hidden_layers": 1}),
        "roberta_prelayernorm": OddModel("RobertaPreLayerNorm", {"num_hidden_layers": 1}),
    },
    operators={"roberta": {"CumSum"}},
)
