"""Families with the same `model_type` are distinguished by other keys of `config.json`."""

from typing import Any

import pytest

from attnlens_model import ConfigError, EncoderConfig

BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 40,
}
JINA = BERT | {"architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi"}
QK_POST_NORM = "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"


@pytest.mark.parametrize(
    ("content", "family"),
    [
        (BERT, "bert"),
        (BERT | {"architectures": ["BertModel"], "position_embedding_type": "absolute"}, "bert"),
        (BERT | {"auto_map": {"AutoModel": "modeling_bert.JinaBertModel"}}, "bert"),
        (JINA, "jina_bert"),
        (BERT | {"position_embedding_type": "alibi"}, "jina_bert"),
        (BERT | {"model_type": "xlm-roberta"}, "roberta"),
        (BERT | {"model_type": "xlm-roberta", "position_embedding_type": "rotary"}, "jina_v3"),
        (BERT | {"model_type": "jina_embeddings_v3"}, "jina_v3"),
    ],
)
def test_jina_is_distinguished_from_bert_and_roberta(content: dict[str, Any], family: str) -> None:
    assert EncoderConfig.from_dict(content).family == family


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"position_embedding_type": "absolute"},
            "position_embedding_type='absolute' is not supported: only",
        ),
        ({"position_embedding_type": None}, "position_embedding_type=None is not supported: only 'alibi'"),
        ({"feed_forward_type": "swiglu"}, "feed_forward_type='swiglu' is not supported: .* geglu, reglu"),
    ],
)
def test_values_that_no_jina_model_has_are_rejected_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(JINA | changes)


@pytest.mark.parametrize(
    "naming", [{"auto_map": {"AutoModel": QK_POST_NORM}}, {"_name_or_path": QK_POST_NORM}]
)
def test_code_variant_is_detected_by_its_repository(naming: dict[str, Any]) -> None:
    usual = EncoderConfig.from_dict(JINA | {"feed_forward_type": "geglu"})
    variant = EncoderConfig.from_dict(JINA | {"feed_forward_type": "geglu"} | naming)
    assert usual.norm.placement == "post"
    assert variant.norm.placement == "post_twice"
    found = [config.by_path()["attention.projection_norm"] for config in (usual, variant)]
    assert found == [False, True]
