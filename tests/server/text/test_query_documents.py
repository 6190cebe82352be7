"""Queries joined with their documents are the pairs that the tokenizer encodes."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from attnlens_server.errors import InvalidFieldsError
from attnlens_server.operations.documents import DocumentEncoder, ScoreRequest
from attnlens_server.text import Input, PairEncoder, TextEncoder, TextPair, parts_of

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


@pytest.mark.parametrize("pair", ["$A $B", "$A:0 $B:1", "[CLS] $A [CLS]:1 $B:1"])
def test_texts_without_a_token_between_them_are_joined(pair: str, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "byte-level" / "tokenizer.json"))
    template: Any = tokenizers.processors.TemplateProcessing
    tokenizer.post_processor = template(single="$A", pair=pair, special_tokens=[("[CLS]", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = PairEncoder(TextEncoder(tmp_path / "tokenizer.json", 64))
    assert encoder.joins
    check(encoder, tokenizer)


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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [0, 6])
def test_long_documents_are_truncated_on_the_side_of_the_tokenizer(
    side: str, limit: int, tmp_path: Path
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "wordpiece" / "tokenizer.json"))
    query, document = PAIRS[-1]
    frame = len(tokenizer.encode(query, ""))
    tokenizer.enable_truncation(frame + (limit or 20), strategy="only_second", direction=side)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pairs = PairEncoder(TextEncoder(tmp_path / "tokenizer.json", frame + 20))
    documents = DocumentEncoder(pairs, frame + 20)
    request = ScoreRequest(query=query, inputs=[Input(text=document)], max_tokens_per_document=limit)
    [scored] = documents.encode(request, [0], "")
    ids, types = scored.pair.arrays(*scored.ranges[0])
    expected = tokenizer.encode(query, document)
    assert (ids.tolist(), types.tolist()) == (expected.ids, expected.type_ids)
    assert scored.num_tokens == len(expected) < scored.num_tokens_total
    encoded, tokens = documents.describe(request, scored.explained(0, 0), "")
    assert encoded.input_ids.tolist() == expected.ids
    assert encoded.num_tokens_total == scored.num_tokens_total
    second = [span for span, source in zip(expected.offsets, expected.sequence_ids, strict=True) if source]
    assert [tuple(span) for span in tokens.chars[-1 - len(second) : -1]] == second


@pytest.mark.parametrize(
    ("query", "document", "field"),
    [
        ("fine", "an <image>", "documents[1]"),
        ("an <image>", "fine", "query"),
        (None, ("fine", "<image>"), "pairs[1].second"),
        (None, ("<image>", "fine"), "pairs[1].first"),
    ],
)
def test_text_with_a_token_that_has_no_embedding_is_named(
    query: str | None, document: Any, field: str, tmp_path: Path
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "wordpiece" / "tokenizer.json"))
    tokenizer.add_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text_encoder = TextEncoder(tmp_path / "tokenizer.json", 64)
    text_encoder.check_ids(300)
    if query is None:
        inputs = [Input(text_pair=TextPair("fine", "fine")), Input(text_pair=TextPair(*document))]
    else:
        inputs = [Input(text="fine"), Input(text=document)]
    request = ScoreRequest(query=query, inputs=inputs)
    with pytest.raises(InvalidFieldsError, match="contains the token '<image>'") as caught:
        DocumentEncoder(PairEncoder(text_encoder), 64).encode(request, [0, 1], "")
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize(
    ("num_tokens", "parts"), [(0, [(0, 0)]), (4, [(0, 4)]), (5, [(0, 4), (4, 5)]), (8, [(0, 4), (4, 8)])]
)
def test_parts_cover_the_document(num_tokens: int, parts: list[tuple[int, int]]) -> None:
    assert list(parts_of(num_tokens, 4)) == parts
