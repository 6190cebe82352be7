"""Configuration, limits and license: read from a checkpoint, written to a bundle."""

from pathlib import Path

import pytest

from attnlens_export import SourceError
from attnlens_export.published.side_files import (
    copy_described,
    read_license,
    read_max_tokens,
    write_config,
)
from attnlens_model import EncoderConfig, read_config
from configs import changed
from small_files import read, write


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    directory = tmp_path / "bundle"
    directory.mkdir()
    return directory


@pytest.mark.parametrize(
    ("sentence_limit", "tokenizer_limit", "expected"),
    [
        (None, None, 40),
        (16, 512, 16),
        (512, 24, 40),
        (30, 24, 30),
        (None, 24, 24),
        (None, int(1e30), 40),
        (None, 1e30, 40),
        (None, -1, 40),
    ],
)
def test_limit_of_the_sentence_settings_takes_precedence(
    sentence_limit: object,
    tokenizer_limit: object,
    expected: int,
    source: Path,
    tiny_config: EncoderConfig,
) -> None:
    write(source / "sentence_bert_config.json", {"max_seq_length": sentence_limit})
    write(source / "tokenizer_config.json", {"model_max_length": tokenizer_limit})
    assert read_max_tokens(source, tiny_config) == expected
    assert read_max_tokens(None, tiny_config) == 40


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\ntags:\n- x\n---\n# Model\n", "apache-2.0"),
        ("---\nlicense: 'mit'\n---\n", "mit"),
        ("---\nlicense: other\nlicense_name: my-license\n---\n", "my-license"),
        ("---\ntags: x\n---\nlicense: mit\n", ""),
        ("# Model\nlicense: mit\n", ""),
        ("---\nlicense: mit\n", ""),
        ("", ""),
    ],
)
def test_license_is_the_one_in_the_header_of_the_readme(text: str, expected: str, source: Path) -> None:
    (source / "README.md").write_text(text, encoding="utf-8")
    assert read_license(source) == expected


def test_without_a_readme_no_license_is_stated(source: Path) -> None:
    assert read_license(source) == read_license(None) == ""


def test_published_configuration_keys_are_kept(source: Path, bundle: Path) -> None:
    published: dict[str, object] = {
        "model_type": "bert",
        "vocab_size": 101,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 56,
        "max_position_embeddings": 40,
        "label2id": {"a": 0},
    }
    write(source / "config.json", published)
    config = read_config(source / "config.json")
    write_config(bundle, source, config, external_data=False)
    assert read(bundle / "config.json") == published | {"pad_token_id": 0}
    write_config(bundle, source, config, external_data=True)
    assert read(bundle / "config.json")["transformers.js_config"] == {"use_external_data_format": True}


def test_configuration_that_reads_back_as_another_is_rejected(
    source: Path, bundle: Path, tiny_config: EncoderConfig
) -> None:
    """The checkpoint's own keys win, so an encoder that is not the checkpoint's can't be described."""
    write_config(source, None, tiny_config, external_data=False)
    other = changed(tiny_config, {"embeddings.vocab_size": 102})
    with pytest.raises(SourceError, match=r"cannot express embeddings\.vocab_size=102"):
        write_config(bundle, source, other, external_data=False)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_fresh_encoder_gets_a_configuration_that_others_read(
    activation: str, bundle: Path, tiny_config: EncoderConfig
) -> None:
    from transformers import AutoConfig  # noqa: PLC0415 - slow

    values = {"feed_forward.activation": activation, "is_causal": True, "embeddings.pad_token_id": 3}
    config = changed(tiny_config, values)
    write_config(bundle, None, config, external_data=False)
    assert read_config(bundle / "config.json") == config
    read_by_others = AutoConfig.from_pretrained(bundle)
    assert read_by_others.model_type == "bert"
    assert read_by_others.hidden_size == 48
    assert read_by_others.pad_token_id == 3


def test_encoder_that_its_family_cannot_describe_is_rejected(
    bundle: Path, tiny_config: EncoderConfig
) -> None:
    config = changed(tiny_config, {"positions.scheme": "padding_offset", "embeddings.size": 8})
    with pytest.raises(SourceError, match=r"bert family cannot express embeddings.size=8, positions.scheme="):
        write_config(bundle, None, config, external_data=False)


def test_licenses_are_copied_and_weights_are_not(source: Path, bundle: Path) -> None:
    for name in ("LICENSE", "LICENSE.txt", "vocab.txt", "model.safetensors", "README.md"):
        (source / name).write_text(name, encoding="utf-8")
    copy_described(bundle, source)
    assert {path.name for path in bundle.iterdir()} == {"LICENSE", "LICENSE.txt", "vocab.txt"}
