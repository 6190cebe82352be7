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
DISTILBERT = [
    OddModel("DistilBert", DISTIL_SIZES),
    OddModel(
        "DistilBert", DISTIL_SIZES | {"activation": "relu", "pad_token_id": 5, "num_hidden_layers": 4}, 17
    ),
    OddModel("DistilBert", DISTIL_SIZES | {"num_attention_heads": 4, "max_position_embeddings": 33}, 33),
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
DATA2VEC = OddModel("Data2VecText", {"pad_token_id": 3, "type_vocab_size": 1})
SPLINTER = OddModel("Splinter", {"layer_norm_eps": 1e-3, "hidden_act": "gelu_new"}, 33)
ERNIE = [
    OddModel("Ernie", {"use_task_id": True, "task_type_vocab_size": 5}),
    OddModel("Ernie", {"layer_norm_eps": 1e-5, "hidden_act": "relu", "type_vocab_size": 4}, 64),
    OddModel("Ernie", {"use_task_id": True, "task_type_vocab_size": 1, "num_attention_heads": 1}, 1),
]
GENERATION = OddModel("BertGeneration", {"layer_norm_eps": 1e-3, "pad_token_id": 9}, kind="Encoder")
REMBERT_SIZES = {"input_embedding_size": 40, "output_embedding_size": 56}
REMBERT = [
    OddModel("RemBert", REMBERT_SIZES),
    OddModel("RemBert", REMBERT_SIZES | {"input_embedding_size": 96, "is_decoder": True}, 64),
]
MEGATRON = [
    OddModel("MegatronBert", {"layer_norm_eps": 1e-5}),
    OddModel("MegatronBert", {"hidden_act": "relu", "type_vocab_size": 3, "num_attention_heads": 4}, 64),
]
XLM_ROBERTA_XL = [
    OddModel("XLMRobertaXL", {"max_position_embeddings": 66}, 64),
    OddModel("XLMRobertaXL", {"type_vocab_size": 2, "pad_token_id": 4, "layer_norm_eps": 1e-3}, 17),
]
PRELAYERNORM = [
    OddModel("RobertaPreLayerNorm", {"max_position_embeddings": 66}, 64),
    OddModel(
        "RobertaPreLayerNorm", {"type_vocab_size": 1, "layer_norm_eps": 1e-3, "num_hidden_layers": 1}, 9
    ),
]
NORMS_FIRST = [*MEGATRON, *XLM_ROBERTA_XL, *PRELAYERNORM]

CASES = FamilyCases(
    models=[
        *(*ROBERTA, *DISTILBERT, *ELECTRA, *ALBERT, DATA2VEC, SPLINTER, GENERATION, *ERNIE, *REMBERT),
        *NORMS_FIRST,
    ],
    one_of_each=[
        *(
            ROBERTA[0],
            DISTILBERT[0],
            ELECTRA[0],
            ALBERT[1],
            DATA2VEC,
            SPLINTER,
            GENERATION,
            ERNIE[0],
            REMBERT[0],
        ),
        *(MEGATRON[0], XLM_ROBERTA_XL[0], PRELAYERNORM[0]),
    ],
    heads=[
        (ROBERTA[0], "ForMaskedLM", {"lm_head.bias"}),
        (ROBERTA[3], "ForSequenceClassification", {"classifier.dense.weight"}),
        (DISTILBERT[0], "ForMaskedLM", {"vocab_transform.weight"}),
        (DISTILBERT[1], "ForQuestionAnswering", {"qa_outputs.weight"}),
        (ELECTRA[0], "ForPreTraining", {"discriminator_predictions.dense.weight"}),
        (ELECTRA[2], "ForMaskedLM", {"generator_predictions.dense.weight"}),
        (ALBERT[1], "ForMaskedLM", {"predictions.dense.weight"}),
        (DATA2VEC, "ForMaskedLM", {"lm_head.bias"}),
        (SPLINTER, "ForQuestionAnswering", {"splinter_qass.query_start_transform.dense.weight"}),
        (GENERATION, "Decoder", {"lm_head.bias"}),
        (ERNIE[0], "ForMaskedLM", {"cls.predictions.bias"}),
        (REMBERT[0], "ForMaskedLM", {"cls.predictions.dense.weight"}),
        (MEGATRON[0], "ForMaskedLM", {"cls.predictions.bias"}),
        (XLM_ROBERTA_XL[0], "ForMaskedLM", {"lm_head.bias"}),
        (PRELAYERNORM[0], "ForSequenceClassification", {"classifier.dense.weight"}),
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
    operators={
        "roberta": {"CumSum"},
        "xlm_roberta_xl": {"CumSum"},
        "roberta_prelayernorm": {"CumSum"},
    },
)
