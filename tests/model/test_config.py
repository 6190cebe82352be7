"""The configuration: rejected values, and its two file formats."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from attnlens_model import (
    ATTENTION_WEIGHTS,
    AttentionOutput,
    ConfigError,
    EmbeddingsConfig,
    EncoderConfig,
    FeedForwardConfig,
    ModelError,
    NormConfig,
    PositionsConfig,
    SoftmaxAttentionConfig,
    read_config,
)
from attnlens_model.config_part import nested
from attnlens_model.families import FAMILIES
from configs import changed

OWN: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 2,
    "embeddings.vocab_size": 1000,
    "positions.max_position_embeddings": 128,
    "attention.kind": "softmax",
    "attention.num_heads": 4,
    "feed_forward.intermediate_size": 256,
}
LOCAL = {"kind": "softmax", "num_heads": 4, "window": 5}
GLOBAL = {"kind": "softmax", "num_heads": 4, "rotary": {"theta": 500.0}}
HUGGING_FACE = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "transformers_version": "4.8.2",
}


def own(changes: dict[str, Any] | None = None) -> EncoderConfig:
    return changed(EncoderConfig.from_dict(nested(OWN)), changes or {})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embeddings.type_vocab_size": 0, "norm.eps": 1e-5, "is_causal": True, "hidden_dropout": 0},
        {"convolution.kernel_size": 3, "feed_forward.activation": "gelu_tanh"},
        {"output_size": 24},
        {"attention": {"kind": "disentangled", "num_heads": 4, "terms": "c2p"}},
        {"attention": [GLOBAL, LOCAL]},
        {"attention.relative_bias.num_buckets": 8},
    ],
    ids=str,
)
def test_json_round_trip_keeps_everything(changes: dict[str, Any]) -> None:
    config = own(changes)
    assert EncoderConfig.from_json(config.to_json()) == config
    assert set(json.loads(config.to_json())) == {field.name for field in dataclasses.fields(EncoderConfig)}


def test_setting_of_an_earlier_version_may_be_null() -> None:
    content = json.loads(own().to_json()) | {"per_layer_input": None}
    assert EncoderConfig.from_dict(content) == own()
    with pytest.raises(ConfigError, match="per_layer_input"):
        EncoderConfig.from_dict(content | {"per_layer_input": {"size": 3}})


def test_parts_from_python_equal_parts_from_json() -> None:
    assert own({"norm.kind": "rms"}) == EncoderConfig(
        hidden_size=64,
        num_layers=2,
        embeddings=EmbeddingsConfig(vocab_size=1000),
        positions=PositionsConfig(max_position_embeddings=128),
        attention=SoftmaxAttentionConfig(num_heads=4),
        feed_forward=FeedForwardConfig(intermediate_size=256),
        norm=NormConfig(kind="rms"),
    )


def test_pattern_of_attention_is_repeated_and_has_one_spelling() -> None:
    config = own({"num_layers": 5, "attention": [GLOBAL, LOCAL, LOCAL]})
    assert [attention.reach for attention in config.layer_attentions] == [None, 5, 5, None, 5]
    assert own({"num_layers": 5, "attention": [GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL]}) == config
    assert own({"num_layers": 5, "attention": [LOCAL] * 5}) == own({"num_layers": 5, "attention": LOCAL})


def test_layer_declares_its_outputs() -> None:
    assert own().layer_outputs(1) == (AttentionOutput(ATTENTION_WEIGHTS, "dense", 4, "one"),)


def test_longest_input_depends_on_the_position_scheme() -> None:
    config = own({"embeddings.pad_token_id": 1, "positions.max_position_embeddings": 514})
    assert config.max_tokens == 514
    assert changed(config, {"positions.scheme": "padding_offset"}).max_tokens == 512


def test_defaults_match_bert() -> None:
    assert own() == EncoderConfig.from_dict(HUGGING_FACE)


def test_token_vectors_are_as_wide_as_the_layers_unless_they_are_projected() -> None:
    assert own().vector_size == 64
    assert own({"output_size": 24}).vector_size == 24


def test_hugging_face_config_is_translated() -> None:
    theirs = HUGGING_FACE | {
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-7,
        "type_vocab_size": 3,
        "pad_token_id": None,
        "is_decoder": True,
        "hidden_dropout_prob": 0,
        "attention_probs_dropout_prob": 0.2,
        "position_embedding_type": "absolute",
    }
    assert EncoderConfig.from_dict(theirs) == own(
        {
            "feed_forward.activation": "gelu_tanh",
            "norm.eps": 1e-7,
            "embeddings.type_vocab_size": 3,
            "is_causal": True,
            "hidden_dropout": 0,
            "attention.dropout": 0.2,
        }
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.num_heads": 5}, "attention.num_heads=5 does not divide hidden_size=64: .* is 4"),
        ({"attention.num_heads": 0}, "attention.num_heads=0: must be at least 1"),
        ({"hidden_size": -64}, "hidden_size=-64: must be at least 1"),
        ({"positions.max_position_embeddings": 0}, "positions.max_position_embeddings=0: must be at least 1"),
        ({"embeddings.type_vocab_size": -1}, "embeddings.type_vocab_size=-1: must be at least 0"),
        ({"embeddings.vocab_size": "1000"}, "embeddings.vocab_size='1000' is str: it must be int"),
        ({"num_layers": True}, "num_layers=True is bool: it must be int"),
        ({"num_layers": 2.0}, "num_layers=2.0 is float: it must be int"),
        ({"is_causal": 1}, "is_causal=1 is int: it must be bool"),
        ({"norm.eps": 0.0}, "norm.eps=0.0: must be greater than 0"),
        ({"norm.eps": float("nan")}, "norm.eps=nan: must be greater than 0"),
        ({"norm.eps": 10**400}, "norm.eps=1000.*must be greater than 0"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0: must be at least 0 and less than 1"),
        ({"attention.dropout": -0.1}, "attention.dropout=-0.1: must be at least 0 and less than 1"),
        (
            {"embeddings.pad_token_id": 1000},
            "embeddings.pad_token_id=1000: must be from 0 to vocab_size - 1 = 999",
        ),
        (
            {"feed_forward.activation": "gelu_tanch"},
            r"feed_forward.activation='gelu_tanch' is not supported \(did you mean 'gelu_tanh'\?\)",
        ),
        ({"feed_forward.activation": 3}, "feed_forward.activation=3 is int: it must be str"),
        ({"family": "brt"}, r"family='brt' is not supported \(did you mean 'bert'\?\): choose one of .*bert"),
        (
            {"positions.scheme": "padding"},
            "positions.scheme='padding' is not supported: choose one of absolute",
        ),
        (
            {
                "positions.scheme": "padding_offset",
                "embeddings.pad_token_id": 1,
                "positions.max_position_embeddings": 2,
            },
            r"positions.max_position_embeddings=2: must be at least pad_token_id \+ 2 = 3",
        ),
        ({"embeddings.size": 0}, "embeddings.size=0: must be at least 1, or null"),
        ({"output_size": 0}, "output_size=0: must be at least 1, or null"),
        ({"output_size": 131_073}, "output_size=131073: must be at most 131,072"),
        ({"embeddings.size": 1.5}, "embeddings.size=1.5 is float: it must be int or null"),
        ({"num_hidden_groups": 0}, "num_hidden_groups=0: must divide num_layers=2, or be null"),
        ({"num_layers": 4, "num_hidden_groups": 3}, "num_hidden_groups=3: must divide num_layers=4"),
        (
            {"num_hidden_groups": 1, "attention": [GLOBAL, LOCAL]},
            "num_hidden_groups=1: must be null if attention differs",
        ),
        ({"num_hidden_groups": 1, "norm.placement": "pre"}, "num_hidden_groups=1: must be null if norm"),
        ({"attention.relative_bias.num_buckets": 2}, "attention.relative_bias.num_buckets=2: must be even"),
        ({"attention.relative_bias.num_buckets": 33}, "attention.relative_bias.num_buckets=33: must be"),
        (
            {"attention.relative_bias": {"num_buckets": 32, "max_distance": 8}},
            "attention.relative_bias.max_distance=8: must be greater than num_buckets / 4 = 8",
        ),
        ({"attention.rotary.theta": -1.0}, "attention.rotary.theta=-1.0: must be greater than 0"),
        ({"attention.rotary": 5}, "attention.rotary=5 is int: it must be an object or null"),
        ({"attention": []}, r"attention=\(\) is tuple: it must be an object or a list of objects"),
        ({"attention": [GLOBAL, LOCAL, LOCAL]}, "attention=.*: must not be longer than num_layers=2"),
        ({"attention.kind": "softmx"}, r"attention.kind='softmx' is not supported \(did you mean 'softmax'"),
        ({"attention": [LOCAL, {"num_heads": 4}]}, r"attention\[1\].kind=None is not supported: choose one"),
        ({"norm": []}, r"norm=\[\] is list: it must be an object"),
        ({"num_heads": 4}, r"unknown key 'num_heads' \(did you mean 'attention.num_heads'\?\)"),
        (
            {"attention.num_head": 4},
            r"unknown key 'attention.num_head' \(did you mean 'attention.num_heads'\?\)",
        ),
        (
            {"attention": [LOCAL, GLOBAL | {"widow": 4}]},
            r"unknown key 'attention\[1\].widow' \(did you mean 'attention\[1\].window'\?\)",
        ),
        (
            {"norm.layer_norm": 4},
            "unknown key 'norm.layer_norm': the keys are those of docs",
        ),
    ],
    ids=lambda value: str(value)[:90] if isinstance(value, dict) else "",
)
def test_bad_value_is_rejected_by_its_path_with_the_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        own(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "bret"},
            r"model_type='bret' is none of attnlens, bert, .*roberta \(did you mean 'bert'\?\): other encod",
        ),
        ({"hidden_act": "gelu_old"}, "hidden_act='gelu_old' is not supported: choose one of gelu, "),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supp"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported: only False is"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads=.* is not supported"),
        ({"num_attention_heads": 5}, "num_heads=5 does not divide hidden_size=64"),
        ({"model_type": "mpnet", "pad_token_id": 0}, "pad_token_id=0 is not supported: only 1 is"),
        (
            {"model_type": "mpnet", "relative_attention_num_buckets": 64},
            "buckets=64 is not supported: only 32",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_hugging_face_config_of_another_model_is_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(HUGGING_FACE | changes)


def test_all_missing_tensors_are_named() -> None:
    with pytest.raises(ConfigError, match="missing num_layers, embeddings, positions"):
        EncoderConfig.from_dict({"hidden_size": 5, "attention": LOCAL, "feed_forward": {}})
    with pytest.raises(ConfigError, match=r"missing attention.num_heads: .* requires attention\.num_heads"):
        own({"attention": {"kind": "softmax"}})
    with pytest.raises(ConfigError, match="does not specify num_attention_heads, max_position_embeddings"):
        EncoderConfig.from_dict(
            {
                key: value
                for key, value in HUGGING_FACE.items()
                if key not in {"num_attention_heads", "max_position_embeddings"}
            }
        )


@pytest.mark.parametrize("values", [nested(OWN), HUGGING_FACE], ids=["own", "hugging face"])
def test_either_kind_of_file_is_read(tmp_path: Path, values: dict[str, object]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert read_config(path) == read_config(str(path)) == own()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "is a JSON list: it must be an object"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"model_type": "bart"}', "'bart' is none of"),
    ],
)
def test_bad_file_is_rejected_with_its_path(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_missing_file_is_rejected_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        read_config(tmp_path / "absent.json")


def test_config_error_is_a_value_error_and_a_model_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, ModelError)


def test_every_family_is_listed_under_its_own_name() -> None:
    assert {name: family.name for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    assert "bert" in FAMILIES


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "1" * 5000 + "}"])
def test_json_that_no_parser_takes_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="the configuration is not JSON"):
        EncoderConfig.from_json(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers=1000000000: must be at most 4,096"),
        ({"num_attention_heads": 10**9}, r"num_attention_heads=1000000000: must be at most 4,096"),
        ({"hidden_size": 10**9}, r"hidden_size=1000000000: must be at most 131,072"),
        ({"vocab_size": 10**9}, r"vocab_size=1000000000: must be at most 16,777,216"),
        ({"intermediate_size": 10**9}, r"intermediate_size=1000000000: must be at most 1,048,576"),
        (
            {"max_position_embeddings": 10**9},
            r"max_position_embeddings=1000000000: must be at most 1,048,576",
        ),
        (
            {"model_type": "modernbert", "num_hidden_layers": 10**9, "global_attn_every_n_layers": 10**9},
            r"num_hidden_layers=1000000000: must be at most 4,096",
        ),
        ({"model_type": "modernbert", "global_attn_every_n_layers": 10**9, "pad_token_id": 0}, None),
    ],
)
def test_sizes_beyond_any_encoder_are_rejected_before_anything_is_built(
    content: dict[str, object], message: str | None
) -> None:
    """The file has 500 bytes, but its encoder would take gigabytes and hours."""
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 16}
    text = json.dumps({"model_type": "bert", **sizes, **content})
    started = time.process_time()
    if message is None:
        EncoderConfig.from_json(text)
    else:
        with pytest.raises(ConfigError, match=message):
            EncoderConfig.from_json(text)
    assert time.process_time() - started < 0.2


def test_sizes_of_our_own_keys_have_the_same_limits() -> None:
    with pytest.raises(ConfigError, match=r"num_layers=4097: must be at most 4,096"):
        own({"num_layers": 4097})
    with pytest.raises(ConfigError, match=r"attention\.head_size=1000000: must be at most 131,072"):
        SoftmaxAttentionConfig(num_heads=1, head_size=1_000_000)
