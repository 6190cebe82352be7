"""How much longer a tokenizer's normalizer can make a text, which bounds the memory of tokenizing.

A normalizer is part of a bundle and may replace one character by a megabyte. Its growth is the largest number
of bytes that it makes of one byte, by its settings.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any

MAX_GROWTH = 4096
MAX_NORMALIZED_BYTES = 4 << 20  # of the texts that are tokenized together
_SLICE_CHARS = 1 << 10

# Largest growth of a character, in bytes of UTF-8 (https://unicode.org/faq/normalization.html).
_GROWTH = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "BertNormalizer": 3.0,
    "ByteLevel": 2.0,
}


def max_growth(normalizer: Any) -> float:  # noqa: ANN401 - the library's object
    """Return an upper bound of the bytes that a normalizer of the library makes of one byte, at least 1."""
    if normalizer is None:
        return 1.0
    return _max_growth(json.loads(normalizer.__getstate__()))


def _max_growth(settings: dict[str, Any]) -> float:
    kind = settings.get("type")
    if kind == "Sequence":
        growth = 1.0
        for each in settings["normalizers"]:
            growth *= _max_growth(each)
        return growth
    if kind == "Replace":
        added = len(settings["content"].encode())
        found = settings["pattern"].get("String")
        if found is None:
            return 1.0 + added  # a regular expression may match between characters
        return max(1.0, added / max(1, len(found.encode())))
    if kind == "Prepend":
        return 1.0 + len(settings["prepend"].encode())
    if kind == "Precompiled":
        return _growth_of_charsmap(base64.b64decode(settings["precompiled_charsmap"]))
    return _GROWTH.get(str(kind), 1.0)


def _growth_of_charsmap(charsmap: bytes) -> float:
    """Return the longest replacement of a SentencePiece map: a trie, then zero-terminated strings."""
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return float(max(1, *map(len, charsmap[start:].split(b"\0"))))


def exceeds_limit(normalizer: Any, growth: float, texts: Iterable[Sequence[str]]) -> bool:  # noqa: ANN401
    """Return whether texts are longer than MAX_NORMALIZED_BYTES together once they are normalized.

    Texts that cannot grow so much cost nothing. The others are normalized slice by slice in bounded memory.
    """
    parts = [part for text in texts for part in text]
    if growth * 4 * sum(map(len, parts)) <= MAX_NORMALIZED_BYTES:  # 4 bytes a character at most
        return False
    size = sum(len(part.encode()) for part in parts)
    if growth * size <= MAX_NORMALIZED_BYTES:
        return False
    size = 0
    for part in parts:
        for start in range(0, len(part), _SLICE_CHARS):
            size += len(normalizer.normalize_str(part[start : start + _SLICE_CHARS]).encode())
            if size > MAX_NORMALIZED_BYTES:
                return True
    return False
