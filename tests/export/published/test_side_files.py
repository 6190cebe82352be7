"""Configuration, tokenizer and license: read from a checkpoint, written to a bundle."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from attnlens_export import SourceError
from attnlens_export.published.side_files import (
    copy_described,
    read_license,
    read_max_tokens,
    write_config,
    write_tokenizer,
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


def test_every_description_of_the_tokenizer_cuts_at_the_publishers_limit(
    source: Path, bundle: Path, tiny_config: EncoderConfig
) -> None:
    """sentence-transformers' `max_seq_length` is the smaller one in most checkpoints."""
    write_word_level(source / "tokenizer.json", 101)
    write(source / "tokenizer_config.json", {"model_max_length": 40, "max_length": 12, "pad_token": "[PAD]"})
    write_tokenizer(bundle, source, None, tiny_config, 24)
    assert read(bundle / "tokenizer.json")["truncation"]["max_length"] == 24
    assert read(bundle / "tokenizer_config.json") == {"model_max_length": 24, "pad_token": "[PAD]"}


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


def write_word_level(path: Path, size: int, last: str | None = None) -> None:
    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{index}": index for index in range(2, size)}
    if last is not None:
        del words[f"w{size - 1}"]
        words[last] = size - 1
    Tokenizer(WordLevel(words, unk_token="[UNK]")).save(str(path))


def test_tokenizer_is_written_with_the_limit_of_the_bundle_and_described(
    source: Path, bundle: Path, tiny_config: EncoderConfig
) -> None:
    """The rest of it stays, in its own spelling: w\N{LATIN SMALL LETTER U WITH DIAERESIS} is not escaped."""
    write_word_level(source / "tokenizer.json", 101, last="w\N{LATIN SMALL LETTER U WITH DIAERESIS}")
    published = Tokenizer.from_file(str(source / "tokenizer.json"))
    published.enable_truncation(7, direction="left")
    published.enable_padding(length=16)
    published.save(str(source / "tokenizer.json"))
    write(source / "tokenizer_config.json", {"unk_token": "[UNK]", "model_max_length": 1e30})
    write_tokenizer(bundle, source, None, tiny_config, 24)
    expected = read(source / "tokenizer.json")
    expected["padding"] = None
    expected["truncation"] = {
        "direction": "Left",
        "max_length": 24,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    assert read(bundle / "tokenizer.json") == expected
    assert "w\N{LATIN SMALL LETTER U WITH DIAERESIS}" in (bundle / "tokenizer.json").read_text("utf-8")
    written = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    assert written.truncation == {
        "direction": "left",
        "max_length": 24,
        "strategy": "longest_first",
        "stride": 0,
    }
    assert written.padding is None
    settings = read(bundle / "tokenizer_config.json")
    assert settings == {"unk_token": "[UNK]", "model_max_length": 24, "pad_token": "[PAD]"}
    assert read(bundle / "special_tokens_map.json") == {"unk_token": "[UNK]", "pad_token": "[PAD]"}


def test_custom_tokenizer_also_replaces_its_settings(
    source: Path, bundle: Path, tmp_path: Path, tiny_config: EncoderConfig
) -> None:
    write_word_level(source / "tokenizer.json", 90)
    write(source / "tokenizer_config.json", {"mask_token": "[MASK]"})
    write_word_level(tmp_path / "mine.json", 50)
    write_tokenizer(bundle, source, tmp_path / "mine.json", tiny_config, 24)
    assert Tokenizer.from_file(str(bundle / "tokenizer.json")).get_vocab_size() == 50
    assert read(bundle / "tokenizer_config.json") == {"model_max_length": 24, "pad_token": "[PAD]"}


def test_tokenizer_without_tokens_is_rejected(source: Path, bundle: Path, tiny_config: EncoderConfig) -> None:
    Tokenizer(WordLevel({}, unk_token="[UNK]")).save(str(source / "tokenizer.json"))
    with pytest.raises(SourceError, match="has an empty vocabulary"):
        write_tokenizer(bundle, source, None, tiny_config, 24)


def test_tokenizer_of_another_model_is_rejected(
    source: Path, bundle: Path, tiny_config: EncoderConfig
) -> None:
    write_word_level(source / "tokenizer.json", 102)
    with pytest.raises(SourceError, match=r"has the id 101 \('w101'\).*vocab_size=101"):
        write_tokenizer(bundle, source, None, tiny_config, 24)


def test_broken_tokenizer_is_rejected(source: Path, bundle: Path, tiny_config: EncoderConfig) -> None:
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SourceError, match="is not a tokenizer"):
        write_tokenizer(bundle, source, None, tiny_config, 24)


def test_missing_custom_tokenizer_is_rejected(source: Path, bundle: Path, tiny_config: EncoderConfig) -> None:
    with pytest.raises(SourceError, match=r"missing\.json is not a tokenizer"):
        write_tokenizer(bundle, source, source / "missing.json", tiny_config, 24)


def test_without_a_tokenizer_nothing_is_written(
    source: Path, bundle: Path, tiny_config: EncoderConfig
) -> None:
    write(source / "tokenizer_config.json", {"mask_token": "[MASK]"})
    write_tokenizer(bundle, source, None, tiny_config, 24)
    assert list(bundle.iterdir()) == []


def test_licenses_are_copied_and_weights_are_not(source: Path, bundle: Path) -> None:
    for name in ("LICENSE", "LICENSE.txt", "vocab.txt", "model.safetensors", "README.md"):
        (source / name).write_text(name, encoding="utf-8")
    copy_described(bundle, source)
    assert {path.name for path in bundle.iterdir()} == {"LICENSE", "LICENSE.txt", "vocab.txt"}
