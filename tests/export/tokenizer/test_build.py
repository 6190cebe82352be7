"""Tokenizers built from vocabularies, compared with those of transformers and sentencepiece."""

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from attnlens_export import SourceError
from attnlens_export.published.side_files import write_tokenizer
from attnlens_export.tokenizer.build import build_tokenizer
from attnlens_export.tokenizer.sentencepiece import PROBES
from configs import small_config
from sentencepiece_families import SENTENCEPIECE
from small_bundles import TOKENIZERS, copy_without_json
from small_files import write

PASSAGES = [
    json.loads(line)["text"]
    for line in (TOKENIZERS.parent / "passages.jsonl").read_text(encoding="utf-8").splitlines()
]
# Includes decomposed kana and Hangul, and words that are special tokens.
TEXTS = [*PASSAGES[::5], *PROBES, "か\u3099 \u1112\u1161\u11ab e\u0323\u0302", "In 1995, a mask"]
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
SPACED = {"__type": "AddedToken", "content": "[Q]", "lstrip": True, "rstrip": True, "normalized": False}
# The content of tokenizer_config.json, and of special_tokens_map.json.
EXTRA_TOKENS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "any": [
        ({ADDITIONAL: ["[Q]", "[D]"]}, {}),
        ({EXTRA: ["[Q]", "the"]}, {}),
        ({EXTRA: {"question_token": "[Q]"}}, {}),
        ({ADDITIONAL: [SPACED]}, {}),
        ({ADDITIONAL: [SPACED | {"normalized": True}]}, {}),
        ({}, {EXTRA: [{"content": "[D]"}, "[Q]"]}),
        ({EXTRA: ["[Q]"]}, {EXTRA: ["[D]"]}),
        ({ADDITIONAL: ["[Q]"]}, {EXTRA: ["[D]"]}),
        ({ADDITIONAL: ["[Q]"]}, {ADDITIONAL: ["[D]"]}),
        ({EXTRA: ["[D]"], ADDITIONAL: ["[Q]"]}, {}),
    ],
    # From a SentencePiece model transformers 5 does not add those of the first.
    "wordpiece": [
        ({}, {ADDITIONAL: ["[D]", "[Q]"]}),
        ({EXTRA: {}}, {ADDITIONAL: ["[D]", "[Q]"]}),
        ({ADDITIONAL: ["[Q]"], "added_tokens_decoder": {"300": {"content": "[D]"}}}, {EXTRA: ["<ent>"]}),
    ],
}
CLASSES = [
    ("wordpiece", "Bert"),
    ("byte-level", "Roberta"),
    ("unigram", "XLMRoberta"),
    ("unigram", "Camembert"),
]


def built(source: Path) -> Tokenizer:
    result = build_tokenizer(source)
    assert result is not None
    return result.tokenizer


def ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(texts)]


@pytest.mark.parametrize(
    ("kind", "description"),
    [
        ("wordpiece", "WordPiece from vocab.txt, lower-casing; [CLS] text [SEP]"),
        ("wordpiece-cased", "WordPiece from vocab.txt, cased; [CLS] text [SEP]"),
        ("byte-level", "byte-level BPE from vocab.json and merges.txt; <s> text </s>"),
        ("unigram", "Unigram from sentencepiece.bpe.model; <s> text </s>"),
    ],
)
def test_built_tokenizer_equals_that_of_transformers(kind: str, description: str, tmp_path: Path) -> None:
    copy_without_json(kind, tmp_path)
    result = build_tokenizer(tmp_path)
    assert result is not None
    assert result.description == description
    saved = Tokenizer.from_file(str(TOKENIZERS / kind / "tokenizer.json"))
    assert ids(result.tokenizer, TEXTS) == ids(saved, TEXTS)
    assert result.tokenizer.get_vocab() == saved.get_vocab()
    pairs: Any = [("one text", "and another"), ("", "b")]
    for mine, theirs in zip(
        result.tokenizer.encode_batch(pairs), saved.encode_batch(pairs), strict=True
    ):  # fmt: skip
        assert (mine.ids, mine.type_ids) == (theirs.ids, theirs.type_ids)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "tokenize_chinese_chars": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-cased"])
def test_wordpiece_matches_the_original_bert_tokenizer(
    kind: str, settings: dict[str, bool], tmp_path: Path
) -> None:
    copy_without_json(kind, tmp_path)
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"} | settings)
    legacy: Any = BertTokenizerLegacy
    oracle = legacy(str(tmp_path / "vocab.txt"), **settings)
    # That one, unlike the fast tokenizers that are published, composes accents first where it keeps them.
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS]
    assert ids(built(tmp_path), texts) == [oracle(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(("kind", "word"), [("wordpiece", "lower-casing"), ("wordpiece-cased", "cased")])
def test_vocabulary_decides_on_lowercasing_by_default(kind: str, word: str, tmp_path: Path) -> None:
    copy_without_json(kind, tmp_path)
    stated = ids(built(tmp_path), TEXTS)
    (tmp_path / "tokenizer_config.json").unlink()
    write(tmp_path / "config.json", {"model_type": "bert"})
    result = build_tokenizer(tmp_path)
    assert result is not None
    assert f"{word} according to its vocabulary" in result.description
    assert ids(result.tokenizer, TEXTS) == stated


def test_mpnet_has_the_templates_of_roberta_and_the_words_of_bert(tmp_path: Path) -> None:
    tokens = (TOKENIZERS / "wordpiece" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    tokens = ["<s>", "<pad>", "</s>", "<mask>", *tokens]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "MPNetTokenizer", "do_lower_case": True})
    oracle: Any = transformers.MPNetTokenizer(
        vocab={token: number for number, token in enumerate(tokens)}, do_lower_case=True
    )
    texts = [*TEXTS, "a <mask> b"]
    assert ids(built(tmp_path), texts) == [oracle(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("prefix", [False, True])
def test_byte_level_adds_a_prefix_space_if_configured(*, prefix: bool, tmp_path: Path) -> None:
    copy_without_json("byte-level", tmp_path)
    settings = {"tokenizer_class": "RobertaTokenizerFast", "add_prefix_space": prefix}
    write(tmp_path / "tokenizer_config.json", settings)
    oracle: Any = transformers.RobertaTokenizer(
        str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), add_prefix_space=prefix
    )
    assert ids(built(tmp_path), TEXTS) == [oracle(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("prefix", [False, True])
def test_gpt2_adds_no_special_tokens_and_marks_its_own_in_the_text(*, prefix: bool, tmp_path: Path) -> None:
    copy_without_json("byte-level", tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    write(tmp_path / "vocab.json", vocabulary | {"<|endoftext|>": len(vocabulary)})
    (tmp_path / "tokenizer_config.json").unlink()
    write(tmp_path / "config.json", {"model_type": "gpt2"})
    if prefix:
        settings = {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}
        write(tmp_path / "tokenizer_config.json", settings)
    oracle: Any = transformers.GPT2Tokenizer(
        str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), add_prefix_space=prefix
    )
    texts = [*TEXTS, "", "the cat<|endoftext|>the cat"]
    tokenizer = built(tmp_path)
    assert ids(tokenizer, texts) == [oracle(text)["input_ids"] for text in texts]
    assert tokenizer.encode("the", " cat").ids == oracle("the", " cat")["input_ids"]
    offsets = oracle(texts[0], return_offsets_mapping=True)["offset_mapping"]
    assert tokenizer.encode(texts[0]).offsets == offsets


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_models_match_sentencepiece(name: str, sentencepiece_source: Any) -> None:
    source = sentencepiece_source(name)
    tokenizer = built(source)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(source / "spiece.model"))
    special = {token for token, number in tokenizer.get_vocab().items() if number in tokenizer.encode("").ids}
    # ALBERT's own steps before SentencePiece are compared with transformers below.
    texts = [text for text in TEXTS if name != "AlbertTokenizer" or (text.isascii() and text.islower())]
    for text in texts:
        expected = oracle.encode(text, out_type=str)
        tokens = [token for token in tokenizer.encode(text).tokens if token not in special]
        assert tokens == expected


# Where transformers itself leaves SentencePiece: it has no table of replacements for DeBERTa.
@pytest.mark.parametrize("name", [name for name in SENTENCEPIECE if name != "DebertaV2Tokenizer"])
def test_sentencepiece_models_have_the_ids_and_templates_of_transformers(
    name: str, sentencepiece_source: Any
) -> None:
    source = sentencepiece_source(name)
    tokenizer = built(source)
    oracle: Any = getattr(transformers, name).from_pretrained(source, vocab_file=str(source / "spiece.model"))
    texts = [*PASSAGES[::5], *PROBES] if name != "AlbertTokenizer" else [*PASSAGES[::5], "Crème Brûlée ``a''"]
    assert ids(tokenizer, texts) == [oracle(text)["input_ids"] for text in texts]
    assert tokenizer.get_vocab_size() == len(oracle)


def test_deberta_text_is_between_cls_and_sep_and_mask_is_appended(
    sentencepiece_source: Any,
) -> None:
    tokenizer = built(sentencepiece_source("DebertaV2Tokenizer"))
    assert tokenizer.encode("").ids == [1, 2]
    assert tokenizer.encode("[MASK]").tokens == ["[CLS]", "[MASK]", "[SEP]"]
    assert tokenizer.token_to_id("[MASK]") == 298


def test_mask_of_deberta_v3_is_in_none_of_its_files(sentencepiece_source: Any, tmp_path: Path) -> None:
    source = shutil.copytree(sentencepiece_source("DebertaV2Tokenizer"), tmp_path, dirs_exist_ok=True)
    (source / "added_tokens.json").unlink()
    text = "a [MASK]"
    oracle = transformers.DebertaV2Tokenizer.from_pretrained(source, vocab_file=str(source / "spiece.model"))
    assert built(source).encode(text).ids == oracle(text)["input_ids"]
    assert 298 in oracle(text)["input_ids"]


def test_albert_cuts_a_number_from_its_comma(sentencepiece_source: Any, tmp_path: Path) -> None:
    from attnlens.sentencepiece.v1.model_pb2 import Model, Piece  # noqa: PLC0415

    shutil.copytree(sentencepiece_source("AlbertTokenizer"), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "spiece.model"
    model = Model.FromString(path.read_bytes())
    model.pieces.extend([Piece(piece="▁7,", score=-1.0), Piece(piece="▁7", score=-3.0)])
    path.write_bytes(model.SerializeToString())
    assert built(tmp_path).encode("7, a").tokens == ["[CLS]", "▁7", ",", "▁a", "[SEP]"]


def test_added_tokens_keep_their_ids_or_are_rejected(tmp_path: Path) -> None:
    copy_without_json("wordpiece", tmp_path)
    write(tmp_path / "added_tokens.json", {"[Q]": 301, "[D]": 300})
    tokenizer = built(tmp_path)
    assert tokenizer.encode("the [Q] of").tokens == ["[CLS]", "the", "[Q]", "of", "[SEP]"]
    assert (tokenizer.token_to_id("[D]"), tokenizer.token_to_id("[Q]")) == (300, 301)
    write(tmp_path / "added_tokens.json", {"[Q]": 305})
    with pytest.raises(
        SourceError, match=r"'\[Q\]'.* has the id 305, but with this vocabulary it would be 300"
    ):
        build_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "settings", "stated"),
    [
        (kind, name, *content)
        for kind, name in CLASSES
        for content in EXTRA_TOKENS["any"] + EXTRA_TOKENS.get(kind, [])
    ],
    ids=str,
)
def test_additional_special_tokens_match_transformers(
    kind: str, name: str, settings: dict[str, Any], stated: dict[str, Any], tmp_path: Path
) -> None:
    copy_without_json(kind, tmp_path)
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": f"{name}Tokenizer"} | settings)
    write(tmp_path / "special_tokens_map.json", stated)
    oracle: Any = getattr(transformers, f"{name}Tokenizer").from_pretrained(tmp_path)
    texts = ["the [Q] of x[D]y <ent> [q]", "[Q][D]", *PASSAGES[:3]]
    tokenizer = built(tmp_path)
    assert ids(tokenizer, texts) == [oracle(text)["input_ids"] for text in texts]
    assert tokenizer.get_vocab() == oracle.get_vocab()


def test_additional_special_tokens_of_the_map_follow_a_sentencepiece_model_too(tmp_path: Path) -> None:
    copy_without_json("unigram", tmp_path)
    size = built(tmp_path).get_vocab_size()
    write(tmp_path / "special_tokens_map.json", {ADDITIONAL: ["[Q]"]})
    assert size in built(tmp_path).encode("the [Q] of").ids


def test_bundle_contains_the_built_tokenizer_with_limits_and_special_tokens(tmp_path: Path) -> None:
    source, bundle = tmp_path / "source", tmp_path / "bundle"
    copy_without_json("byte-level", source)
    config = small_config({"embeddings.vocab_size": 300, "embeddings.pad_token_id": 1})
    assert write_tokenizer(bundle, source, None, config, 24).startswith("byte-level BPE from")
    assert json.loads((bundle / "tokenizer.json").read_text())["truncation"]["max_length"] == 24
    special = json.loads((bundle / "special_tokens_map.json").read_text())
    assert special == {
        "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>",
        "mask_token": "<mask>",
    }  # fmt: skip
    with pytest.raises(SourceError, match=r"has the id 299 .*vocab_size=299"):
        write_tokenizer(bundle, source, None, small_config({"embeddings.vocab_size": 299}), 24)
    # An existing tokenizer.json is used, regardless of other files.
    shutil.copyfile(TOKENIZERS / "byte-level" / "tokenizer.json", source / "tokenizer.json")
    assert not write_tokenizer(bundle, source, None, config, 24)
