"""Files that a tokenizer is not built from, as nobody could be certain of it."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attnlens_export import SourceError
from attnlens_export.tokenizer.build import build_tokenizer
from small_bundles import copy_without_json
from small_files import write

EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({ADDITIONAL: "[Q]"}, r"are '\[Q\]', not a list"),
        ({ADDITIONAL: [5]}, r"the additional special token \{'content': 5\} .* has no content"),
        ({ADDITIONAL: ["[Q]"], "mask_token": "[M]"}, r"lacks \[M\] as well as \[Q\], .* ambiguous"),
    ],
)
def test_additional_special_tokens_that_are_not_certain_are_rejected(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    copy_without_json("wordpiece", tmp_path)
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"} | settings)
    with pytest.raises(SourceError, match=message):
        build_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("wordpiece", {"tokenizer_class": "PhobertTokenizer"}, "the tokenizer class 'PhobertTokenizer'"),
        ("wordpiece", {}, "the tokenizer class 'of model_type None'"),
        ("wordpiece", {"tokenizer_class": "RobertaTokenizer"}, "is built from vocab.json and merges.txt"),
        ("byte-level", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, "add_bos_token=True in"),
        ("unigram", {"tokenizer_class": "BertTokenizer"}, "but a BertTokenizer is built from vocab.txt"),
        (
            "wordpiece",
            {"tokenizer_class": "BertTokenizer", "do_basic_tokenize": False},
            "do_basic_tokenize=False",
        ),
        ("wordpiece", {"tokenizer_class": "MPNetTokenizer"}, "lacks <s>, </s>:"),
        ("wordpiece", {"tokenizer_class": "BertTokenizer", "cls_token": "[X]"}, r"lacks \[X\]"),
    ],
)
def test_ambiguous_tokenizer_is_rejected_with_a_remedy(
    kind: str, settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    copy_without_json(kind, tmp_path)
    write(tmp_path / "tokenizer_config.json", settings)
    with pytest.raises(SourceError, match=message) as caught:
        build_tokenizer(tmp_path)
    assert "--tokenizer FILE" in str(caught.value)


def test_half_of_a_byte_level_tokenizer_is_rejected(tmp_path: Path) -> None:
    copy_without_json("byte-level", tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(SourceError, match=r"has vocab\.json, but a RobertaTokenizer is built from"):
        build_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sentencepiece.bpe.model", b"\xff\xff", "is not a SentencePiece model"),
        ("sentencepiece.bpe.model", b"", "has no piece of type unknown"),
        ("vocab.txt", b"\xff", "is not readable as UTF-8"),
    ],
)
def test_damaged_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    copy_without_json("wordpiece" if name == "vocab.txt" else "unigram", tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        build_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "bpe"}, "of type BPE, but only Unigram is supported"),
        ({"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}, "starts with <pad>, <unk>, <s>"),
        ({"treat_whitespace_as_suffix": True}, "does not prepend ▁ to words"),
    ],
)
def test_model_of_another_layout_is_rejected(
    settings: dict[str, Any], message: str, train: ModuleType, tmp_path: Path
) -> None:
    train.train_sentencepiece(tmp_path / "spiece", normalization_rule_name="identity", **settings)
    write(tmp_path / "config.json", {"model_type": "xlm-roberta"})
    with pytest.raises(SourceError, match=message):
        build_tokenizer(tmp_path)


def test_tokenizer_that_differs_from_sentencepiece_is_rejected(
    sentencepiece_source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlens_export.tokenizer.sentencepiece._normalizers", lambda _model: [])
    with pytest.raises(SourceError, match="SentencePiece as"):
        build_tokenizer(sentencepiece_source("XLMRobertaTokenizer"))
