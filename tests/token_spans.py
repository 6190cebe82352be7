"""Token spans, counted by hand, for each tokenizer in tests/data/tokenizers."""

from typing import NamedTuple

from attnlens_server.text import EncodedInput, TextEncoder, TokenSource

KINDS = ("wordpiece", "wordpiece-cased", "byte-level", "unigram")

# Text: (spelling, characters, bytes) of each token.
Expected = dict[str, list[tuple[str, tuple[int, int], tuple[int, int]]]]

WORDPIECE: Expected = {
    # The accent is stripped; é is one character and two bytes.
    "the café": [
        ("the", (0, 3), (0, 3)), ("c", (4, 5), (4, 5)), ("##a", (5, 6), (5, 6)), ("##f", (6, 7), (6, 7)),
        ("##e", (7, 8), (7, 9)),
    ],
    # e and a combining accent: two characters, three bytes, one token.
    "e\u0301te\u0301 a": [
        ("e", (0, 2), (0, 3)), ("##t", (2, 3), (3, 4)), ("##e", (3, 5), (4, 7)), ("a", (6, 7), (8, 9)),
    ],
    "東京 の": [("東", (0, 1), (0, 3)), ("京", (1, 2), (3, 6)), ("[UNK]", (3, 4), (7, 10))],
    "😀 the": [("😀", (0, 1), (0, 4)), ("the", (2, 5), (5, 8))],
    # Woman, joiner, computer: the tokenizer drops the joiner, which is not a mark, so no token covers it.
    "👩\u200d💻!": [("👩", (0, 1), (0, 4)), ("##💻", (2, 3), (7, 11)), ("!", (3, 4), (11, 12))],
    # A flag is two letters; the word is unknown as a whole.
    "a🇳🇴": [("[UNK]", (0, 3), (0, 9))],
    # A heart and a variation selector, which is a mark.
    "❤\ufe0f a": [("❤", (0, 2), (0, 6)), ("a", (3, 4), (7, 8))],
    # Vowel signs and a virama are marks: dropped, and part of the letter before.
    "नमस्ते": [
        ("न", (0, 1), (0, 3)), ("##म", (1, 2), (3, 6)), ("##स", (2, 4), (6, 12)), ("##त", (4, 6), (12, 18)),
    ],
    # Lower-casing makes two characters of İ.
    "a İ a": [("a", (0, 1), (0, 1)), ("i", (2, 3), (2, 4)), ("a", (4, 5), (5, 6))],
    "  the  man\t\n": [("the", (2, 5), (2, 5)), ("man", (7, 10), (7, 10))],
    "": [],
    " ": [],
}  # fmt: skip

WORDPIECE_CASED: Expected = {
    "the café": [
        ("the", (0, 3), (0, 3)), ("c", (4, 5), (4, 5)), ("##a", (5, 6), (5, 6)), ("##f", (6, 7), (6, 7)),
        ("##é", (7, 8), (7, 9)),
    ],
    "e\u0301te\u0301 a": [("[UNK]", (0, 5), (0, 7)), ("a", (6, 7), (8, 9))],
    # Marks are separate tokens in this tokenizer.
    "❤\ufe0f a": [("❤", (0, 1), (0, 3)), ("##\ufe0f", (1, 2), (3, 6)), ("a", (3, 4), (7, 8))],
    "İ": [("İ", (0, 1), (0, 2))],
}  # fmt: skip

BYTE_LEVEL: Expected = {
    # Two tokens for the two bytes of é, each with the span of the whole character.
    "the é": [
        ("t", (0, 1), (0, 1)), ("he", (1, 3), (1, 3)),
        ("Ġ", (3, 4), (3, 4)), ("Ã", (4, 5), (4, 6)), ("©", (4, 5), (4, 6)),
    ],
    # The span of a word excludes the preceding space.
    "a the": [("a", (0, 1), (0, 1)), ("Ġthe", (2, 5), (2, 5))],
    # The bytes of the accent are separate tokens.
    "e\u0301t": [
        ("e", (0, 1), (0, 1)), ("Ì", (1, 2), (1, 3)), ("ģ", (1, 2), (1, 3)), ("t", (2, 3), (3, 4)),
    ],
    "😀 the": [
        ("ð", (0, 1), (0, 4)), ("Ł", (0, 1), (0, 4)), ("ĺ", (0, 1), (0, 4)), ("Ģ", (0, 1), (0, 4)),
        ("Ġthe", (2, 5), (5, 8)),
    ],
    "東 a": [
        ("æ", (0, 1), (0, 3)), ("Ŀ", (0, 1), (0, 3)), ("±", (0, 1), (0, 3)), ("Ġa", (2, 3), (4, 5)),
    ],
    # A whitespace token has the span of the whitespace.
    "  the  man ": [
        ("Ġ", (0, 1), (0, 1)), ("Ġthe", (2, 5), (2, 5)), ("Ġ", (5, 6), (5, 6)),
        ("Ġm", (7, 8), (7, 8)), ("an", (8, 10), (8, 10)), ("Ġ", (10, 11), (10, 11)),
    ],
    "a\n": [("a", (0, 1), (0, 1)), ("Ċ", (1, 2), (1, 2))],
    "": [],
}  # fmt: skip

UNIGRAM: Expected = {
    "the café": [
        ("▁the", (0, 3), (0, 3)), ("▁ca", (4, 6), (4, 6)), ("f", (6, 7), (6, 7)), ("é", (7, 8), (7, 9)),
    ],
    # The mark before the first word has no span; e and accent are composed to é.
    "e\u0301te\u0301 a": [
        ("▁", (0, 0), (0, 0)), ("é", (0, 2), (0, 3)), ("t", (2, 3), (3, 4)), ("é", (3, 5), (4, 7)),
        ("▁a", (6, 7), (8, 9)),
    ],
    "東京 の": [
        ("▁", (0, 0), (0, 0)), ("東", (0, 1), (0, 3)), ("京", (1, 2), (3, 6)),
        ("▁", (3, 3), (7, 7)), ("の", (3, 4), (7, 10)),
    ],
    "👩\u200d💻!": [
        ("▁", (0, 0), (0, 0)), ("👩", (0, 1), (0, 4)), ("\u200d", (1, 2), (4, 7)), ("💻", (2, 3), (7, 11)),
        ("!", (3, 4), (11, 12)),
    ],
    "a🇳🇴": [("▁a", (0, 1), (0, 1)), ("🇳", (1, 2), (1, 5)), ("🇴", (2, 3), (5, 9))],
    # The ligature ﬁ becomes f and i in two tokens, both with the span of the ligature.
    "ﬁne": [("▁", (0, 0), (0, 0)), ("f", (0, 1), (0, 3)), ("in", (0, 2), (0, 4)), ("e", (2, 3), (4, 5))],
    # An ideographic space is whitespace; a soft hyphen is removed.
    "\u3000the\u00ad a": [("▁the", (1, 4), (3, 6)), ("▁a", (6, 7), (9, 10))],
    "  the  man\t": [("▁the", (2, 5), (2, 5)), ("▁man", (7, 10), (7, 10))],
    "": [],
    " ": [],
}  # fmt: skip

TABLES = dict(zip(KINDS, (WORDPIECE, WORDPIECE_CASED, BYTE_LEVEL, UNIGRAM), strict=True))


class SpelledToken(NamedTuple):
    """A row of `Tokens`."""

    id: int
    text: str
    source: TokenSource
    chars: tuple[int, int]
    bytes: tuple[int, int]
    word: int | None


def described(encoded: EncodedInput, text_encoder: TextEncoder) -> list[SpelledToken]:
    """Return the tokens of an input in the format of server responses."""
    tokens = text_encoder.describe(encoded)
    columns = (tokens.ids, tokens.texts, tokens.sources, tokens.chars, tokens.bytes, tokens.words)
    return [SpelledToken(*row) for row in zip(*columns, strict=True)]
