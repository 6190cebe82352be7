"""Queries joined with their documents are the pairs that the tokenizer encodes."""

import json
from pathlib import Path

import pytest
import tokenizers

from attnlens_server.text import PairEncoder, TextEncoder, parts_of

TOKENIZERS = Path(__file__).parents[2] / "data" / "tokenizers"
PAIRS = [
    ("the man", "a café in the sea"),
    ("the man", ""),
    ("", "the man"),
    ("  the ", "\tthe  man "),
    ("[SEP] </s> the", "<s> [CLS] man"),
    ("東京 😀", "naïve Straße " * 40),
]


@pytest.mark.parametrize("kind", ["wordpiece", "wordpiece-cased", "byte-level", "unigram"])
def test_joined_texts_are_the_tokenizers_pairs(kind: str) -> None:
    path = TOKENIZERS / kind / "tokenizer.json"
    encoder = PairEncoder(TextEncoder(path, 64))
    assert encoder.joins
    check(encoder, tokenizers.Tokenizer.from_file(str(path)))


def test_pairs_of_another_form_are_encoded_as_a_whole(tmp_path: Path) -> None:
    content = json.loads((TOKENIZERS / "wordpiece" / "tokenizer.json").read_text(encoding="utf-8"))
    special = {"id": "[SEP]", "ids": [3], "tokens": ["[SEP]"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
        "pair": [
            {"Sequence": {"id": "B", "type_id": 1}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "special_tokens": {"[SEP]": special},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    encoder = PairEncoder(TextEncoder(path, 64))
    assert not encoder.joins
    check(encoder, tokenizers.Tokenizer.from_file(str(path)))


def check(encoder: PairEncoder, tokenizer: tokenizers.Tokenizer) -> None:
    """Compare pairs, and pairs whose document is truncated, with the tokenizer's own."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoded = encoder.encode(PAIRS)
    for pair, found in zip(PAIRS, encoded, strict=True):
        whole = tokenizer.encode(*pair)
        ids, types = found.arrays(0, len(found.document_ids))
        assert (ids.tolist(), types.tolist()) == (whole.ids, whole.type_ids)
        assert found.num_tokens == len(whole)
    limit = encoded[-1].num_tokens - 7
    tokenizer.enable_truncation(limit, strategy="only_second")
    ids, types = encoded[-1].arrays(0, len(encoded[-1].document_ids) - 7)
    cut = tokenizer.encode(*PAIRS[-1])
    assert (ids.tolist(), types.tolist()) == (cut.ids, cut.type_ids)


@pytest.mark.parametrize(
    ("num_tokens", "parts"), [(0, [(0, 0)]), (4, [(0, 4)]), (5, [(0, 4), (4, 5)]), (8, [(0, 4), (4, 8)])]
)
def test_parts_cover_the_document(num_tokens: int, parts: list[tuple[int, int]]) -> None:
    assert list(parts_of(num_tokens, 4)) == parts
