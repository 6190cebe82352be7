"""The configuration: what it refuses, and the two kinds of file it comes from."""

import dataclasses
import json
from pathlib import Path

import pytest

from attnlens_model import ConfigError, EncoderConfig, ModelError, read_config
from attnlens_model.families import FAMILIES

OWN = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
}
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


def test_json_round_trip_keeps_everything() -> None:
    config = EncoderConfig.from_dict(
        OWN | {"type_vocab_size": 0, "activation": "gelu_tanh", "layer_norm_eps": 1e-5, "is_causal": True}
    )
    assert EncoderConfig.from_json(config.to_json()) == config
    assert set(json.loads(config.to_json())) == {field.name for field in dataclasses.fields(EncoderConfig)}


def test_the_longest_input_is_what_the_position_scheme_leaves() -> None:
    config = EncoderConfig.from_dict(OWN | {"pad_token_id": 1, "max_position_embeddings": 514})
    assert config.max_tokens == 514
    assert dataclasses.replace(config, position_scheme="padding_offset").max_tokens == 512


def test_the_defaults_are_those_of_bert() -> None:
    assert EncoderConfig.from_dict(OWN) == EncoderConfig.from_dict(HUGGING_FACE)
    assert EncoderConfig.from_dict(OWN).head_dim == 16


def test_a_hugging_face_config_is_translated() -> None:
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
    assert EncoderConfig.from_dict(theirs) == EncoderConfig(
        **OWN,  # type: ignore[arg-type]
        activation="gelu_tanh",
        layer_norm_eps=1e-7,
        type_vocab_size=3,
        pad_token_id=0,
        is_causal=True,
        hidden_dropout=0,
        attention_dropout=0.2,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 does not divide hidden_size=64: the nearest that does is 4"),
        ({"num_heads": 0}, "num_heads=0: must be at least 1"),
        ({"hidden_size": -64}, "hidden_size=-64: must be at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0: must be at least 1"),
        ({"type_vocab_size": -1}, "type_vocab_size=-1: must be at least 0"),
        ({"vocab_size": "1000"}, "vocab_size='1000' is str: it must be int"),
        ({"num_layers": True}, "num_layers=True is bool: it must be int"),
        ({"num_layers": 2.0}, "num_layers=2.0 is float: it must be int"),
        ({"is_causal": 1}, "is_causal=1 is int: it must be bool"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0: must be greater than 0"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps=nan: must be greater than 0"),
        ({"hidden_dropout": 1.0}, "hidden_dropout=1.0: must be at least 0 and less than 1"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1: must be at least 0 and less than 1"),
        ({"pad_token_id": 1000}, "pad_token_id=1000: must be from 0 to vocab_size - 1 = 999"),
        (
            {"activation": "gelu_tanch"},
            r"activation='gelu_tanch' is not supported \(did you mean 'gelu_tanh'\?\)",
        ),
        ({"family": "brt"}, r"family='brt' is not supported \(did you mean 'bert'\?\): choose one of .*bert"),
        (
            {"position_scheme": "padding"},
            "position_scheme='padding' is not supported: choose one of absolute",
        ),
        (
            {"position_scheme": "padding_offset", "pad_token_id": 1, "max_position_embeddings": 2},
            r"max_position_embeddings=2: must be at least pad_token_id \+ 2 = 3",
        ),
        ({"embedding_size": 0}, "embedding_size=0: must be at least 1, or null"),
        ({"embedding_size": 1.5}, r"embedding_size=1.5 is float: it must be int \| None"),
        ({"num_hidden_groups": 0}, "num_hidden_groups=0: must divide num_layers=2, or be null"),
        ({"num_layers": 4, "num_hidden_groups": 3}, "num_hidden_groups=3: must divide num_layers=4"),
        (
            {"relative_attention_num_buckets": 2},
            "relative_attention_num_buckets=2: must be even and at least",
        ),
        ({"relative_attention_num_buckets": 33}, "relative_attention_num_buckets=33: must be even"),
        (
            {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 8},
            "relative_attention_max_distance=8: must be greater than .* = 8",
        ),
        ({"num_head": 4}, r"unknown key 'num_head' \(did you mean 'num_heads'\?\)"),
        ({"sliding": 4}, "unknown key 'sliding': the keys are those of docs/configuration.md"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_refused_by_name_with_the_limit(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(OWN | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "bret"},
            r"model_type='bret' is not known \(did you mean 'bert'\?\): attnlens reads .* albert, bert",
        ),
        ({"hidden_act": "gelu_old"}, "hidden_act='gelu_old' is not supported: this version knows gelu, "),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key' is not supp"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported: only False is"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads=.* is not supported"),
        ({"num_attention_heads": 5}, "num_heads=5 does not divide hidden_size=64"),
        ({"model_type": "mpnet", "pad_token_id": 0}, "pad_token_id=0 is not supported: only 1 is"),
        (
            {"model_type": "mpnet", "relative_attention_num_buckets": 64},
            "buckets=64 is not supported: only 32",
        ),
        ({"model_type": "albert", "inner_group_num": 2}, "inner_group_num=2 is not supported: only 1 is"),
        ({"model_type": "distilbert"}, "does not say dim, n_layers, n_heads, hidden_dim"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_hugging_face_config_of_another_model_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EncoderConfig.from_dict(HUGGING_FACE | changes)


def test_all_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="missing hidden_size, num_layers"):
        EncoderConfig.from_dict({"vocab_size": 5, "num_heads": 1, "intermediate_size": 8})
    with pytest.raises(ConfigError, match="does not say num_attention_heads, max_position_embeddings"):
        EncoderConfig.from_dict(
            {
                key: value
                for key, value in HUGGING_FACE.items()
                if key not in {"num_attention_heads", "max_position_embeddings"}
            }
        )


@pytest.mark.parametrize("values", [OWN, HUGGING_FACE], ids=["own", "hugging face"])
def test_either_kind_of_file_is_read(tmp_path: Path, values: dict[str, object]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert read_config(path) == read_config(str(path)) == EncoderConfig.from_dict(OWN)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "is a JSON list: it must be an object"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"model_type": "bart"}', "'bart' is an encoder and a decoder"),
    ],
)
def test_a_bad_file_is_refused_with_its_path(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        read_config(tmp_path / "absent.json")


def test_a_config_error_is_a_value_error_and_a_model_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, ModelError)


def test_every_family_is_listed_under_its_own_name() -> None:
    assert {name: family.name for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
    assert "bert" in FAMILIES


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "1" * 5000 + "}"])
def test_json_that_no_parser_takes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the configuration is not JSON"):
        EncoderConfig.from_json(text)


def test_a_number_larger_than_any_float_is_refused() -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 8}
    with pytest.raises(ConfigError, match=r"layer_norm_eps=1000.*must be greater than 0"):
        EncoderConfig.from_dict(sizes | {"layer_norm_eps": 10**400})
