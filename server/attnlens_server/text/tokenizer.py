"""The tokenizer of a bundle, and limits on the memory that tokenization needs.

A bundle's tokenizer can contain a normalizer that replaces one character by a megabyte. The growth of a
normalizer is the largest number of bytes that its settings can produce from one byte.
"""

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import tokenizers

from attnlens.chat_template import ChatTemplate, Frame, encode_end, frame_of, replace_end
from attnlens_server.config import ConfigError
from attnlens_server.errors import StartupError
from attnlens_server.text.tokens import (
    EncodedInput,
    Record,
    Tokens,
    describe,
    describe_ids,
    keep_white_space,
)

P = ParamSpec("P")
R = TypeVar("R")

_REMEDY = "export the bundle again, with the tokenizer that belongs to the model"
_MAX_PROBE_TOKENS = 64  # maximum tokens for one letter; byte-level tokenizers return several
MAX_GROWTH = 4096
MAX_NORMALIZED_BYTES = 4 << 20  # total of the texts that are tokenized together
SHORT_CHARS = 1 << 8  # texts that are tokenized in about 50 us
_SLICE_CHARS = 1 << 10

# Maximum growth of a character in UTF-8 bytes (https://unicode.org/faq/normalization.html).
_GROWTH = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "BertNormalizer": 3.0,
    "ByteLevel": 2.0,
}


class UntokenizableError(Exception):
    """Texts cannot be tokenized. The message is worded to follow a field name.

    Attributes:
        is_growth: Whether the normalized texts are too long in total. Otherwise, the tokenizer failed for one
            of the texts.
    """

    def __init__(self, message: str, *, is_growth: bool) -> None:
        super().__init__(message)
        self.is_growth = is_growth


class TextEncoder:
    """The tokenizer of a bundle. Thread-safe: nothing is modified after `check_ids`.

    Attributes:
        max_tokens: Maximum number of tokens, including special tokens.
        truncation_side: "left" if truncation removes the beginning of a text, "right" if it removes the end.
        takes_pairs: Whether `max_tokens` exceeds the number of special tokens of a pair.
        template: Chat template into which texts are inserted, or None.
    """

    def __init__(self, path: Path, max_tokens: int, template: ChatTemplate | None = None) -> None:
        """Load `tokenizer.json`.

        Args:
            path: The file.
            max_tokens: Maximum number of tokens, including special tokens.
            template: Chat template into which texts are inserted.

        Raises:
            StartupError: The file is not a valid tokenizer, or its normalizer exceeds MAX_GROWTH.
            ConfigError: `max_tokens` does not exceed the number of special tokens or those of the template.
        """
        try:
            # Two tokenizers, because truncation is a setting of the tokenizer and not of the call.
            self._counting = tokenizers.Tokenizer.from_file(str(path))
            self._truncating = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise StartupError(f"{path} is not a tokenizer: {error}") from error
        self.max_tokens = max_tokens
        self._normalizer: Any = self._counting.normalizer
        self._growth = max_growth(self._normalizer)
        if self._growth > MAX_GROWTH:
            raise StartupError(
                f"the normalizer of {path} can expand one byte to {self._growth:.0f} bytes, but the limit is "
                f"{MAX_GROWTH}: {_REMEDY}"
            )
        for tokenizer in (self._counting, self._truncating):
            tokenizer.no_padding()
            keep_white_space(tokenizer)
        self._counting.no_truncation()
        self.template = template
        num_special = self._counting.num_special_tokens_to_add(is_pair=False)
        if template is not None:
            rendered = template.frame("").around("")
            num_special = len(self._counting.encode(rendered, add_special_tokens=False))
        if max_tokens <= num_special:
            raise ConfigError(
                f"max_tokens is {max_tokens}, but each text has {num_special} special tokens: use at least "
                f"{num_special + 1}"
            )
        self._path = path
        self._without_embedding: dict[int, str] = {}
        self.takes_pairs = max_tokens > self._counting.num_special_tokens_to_add(is_pair=True)
        self.truncation_side = str((self._truncating.truncation or {}).get("direction", "right"))
        # The default strategy truncates the longer text of a pair first, as transformers does.
        self._truncating.enable_truncation(max_tokens, direction=self.truncation_side)

    def check_ids(self, vocab_size: int, type_vocab_size: int = 0) -> None:
        """Validate the ids of the vocabulary and of special tokens, which are specified separately.

        Added tokens without an embedding are accepted, and texts that contain one are rejected.

        Args:
            vocab_size: Number of token ids of the model.
            type_vocab_size: Number of token types of the model. 0 if it has none.

        Raises:
            StartupError: An id or a type is too large, or a single letter has too many tokens.
        """
        path = self._path
        single, pair = self._guarded([("a",)], self._counting.encode_batch, ["a", ("a", "a")])
        vocabulary = self._counting.get_vocab(with_added_tokens=True)
        added = self._counting.get_added_tokens_decoder()
        self._without_embedding = {
            number: token.content for number, token in added.items() if number >= vocab_size
        }
        trained = (number for number in vocabulary.values() if number not in self._without_embedding)
        largest = max(*trained, *single.ids, *pair.ids, 0)
        if largest >= vocab_size:
            raise StartupError(
                f"{path} has the id {largest}, but the model only supports ids below {vocab_size}: {_REMEDY}"
            )
        if type_vocab_size and max(single.type_ids, default=0) >= type_vocab_size:
            raise StartupError(
                f"{path} has the token type {max(single.type_ids)}, but the model only supports types below "
                f"{type_vocab_size}: {_REMEDY}"
            )
        if len(single) - self._counting.num_special_tokens_to_add(is_pair=False) > _MAX_PROBE_TOKENS:
            raise StartupError(
                f"{path} splits one letter into {len(single)} tokens, but the limit is {_MAX_PROBE_TOKENS}: "
                f"{_REMEDY}"
            )

    def encode(
        self,
        texts: Sequence[tuple[str, ...]],
        *,
        prompt: str = "",
        with_record: bool = False,
        truncate: bool = True,
    ) -> list[EncodedInput]:
        """Tokenize texts and pairs.

        Args:
            texts: Tuples (text,) or (text, second text).
            prompt: Prompt to prepend to each text, or to the first text of a pair. If the model has a chat
                template, the prompt is its system message.
            with_record: Whether to keep the tokenizer output, which `describe` needs.
            truncate: Whether to truncate to `max_tokens`. `num_tokens_total` is the length before truncation.

        Raises:
            UntokenizableError: The tokenizer fails, the normalized texts are too long, or a text contains a
                token without an embedding.
        """
        frame = frame_of(self.template, prompt)
        sources = [(frame.around(first), *rest) for first, *rest in texts]
        adds = not frame.is_template
        wholes = self._guarded(
            sources, self._encode_whole, sources, with_offsets=with_record, add_special_tokens=adds
        )
        self._check_embeddings(wholes)
        result = []
        for text, source, whole in zip(texts, sources, wholes, strict=True):
            encoding, num_tokens, num_replaced = whole, len(whole), 0
            if truncate and num_tokens > self.max_tokens:
                [encoding] = self._truncating.encode_batch(
                    [source if len(source) > 1 else source[0]], add_special_tokens=adds
                )
            lack_their_ends = self._lack_their_ends(whole, encoding, len(text))
            if truncate and frame.is_template and num_tokens >= self.max_tokens:
                encoding, num_replaced = self._replace_end(encoding, frame)
            record = Record(encoding, frame, text, lack_their_ends, num_replaced) if with_record else None
            types = np.asarray(encoding.type_ids, np.int64)
            type_ids = types if len(text) > 1 or types.any() else None
            input_ids = np.asarray(encoding.ids, dtype=np.int64)
            result.append(EncodedInput(input_ids, num_tokens, token_type_ids=type_ids, record=record))
        return result

    def _replace_end(self, encoding: tokenizers.Encoding, frame: Frame) -> tuple[tokenizers.Encoding, int]:
        """Return the encoding with the end of the template, and the number of its tokens."""
        end = encode_end(self._counting, frame)
        return (encoding, 0) if end is None else (replace_end(encoding, end), min(len(end), len(encoding)))

    def _encode_whole(
        self, sources: Sequence[tuple[str, ...]], *, with_offsets: bool, add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        """Tokenize texts and pairs without truncation. Offsets may be missing if `with_offsets` is False."""
        if sum(len(part) for source in sources for part in source) <= SHORT_CHARS:
            # `encode` does not release the GIL. To get it back would take longer than to tokenize.
            return [
                self._counting.encode(
                    source[0],
                    source[1] if len(source) > 1 else None,
                    add_special_tokens=add_special_tokens,
                )
                for source in sources
            ]
        encode_batch = self._counting.encode_batch if with_offsets else self._counting.encode_batch_fast
        encodings: list[tokenizers.Encoding] = encode_batch(
            [source if len(source) > 1 else source[0] for source in sources],
            add_special_tokens=add_special_tokens,
        )
        return encodings

    def encode_alone(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts without special tokens and without truncation.

        Raises:
            UntokenizableError: See `encode`.
        """
        encodings = self._guarded(
            [(text,) for text in texts],
            self._counting.encode_batch_fast,
            [*texts],
            add_special_tokens=False,
        )
        self._check_embeddings(encodings)
        return [encoding.ids for encoding in encodings]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tokenizers.Encoding]:
        """Tokenize pairs without truncation.

        Raises:
            UntokenizableError: See `encode`.
        """
        encodings: list[tokenizers.Encoding] = self._guarded(
            pairs, self._counting.encode_batch_fast, [*pairs]
        )
        self._check_embeddings(encodings)
        return encodings

    def _check_embeddings(self, encodings: Sequence[tokenizers.Encoding]) -> None:
        """Reject texts with tokens for which the model has no embedding."""
        if not self._without_embedding:
            return
        for encoding in encodings:
            if found := self._without_embedding.keys() & encoding.ids:
                token = self._without_embedding[min(found)]
                raise UntokenizableError(
                    f"contains the token {token!r}, for which the model has no embedding: remove it",
                    is_growth=False,
                )

    def _guarded(
        self,
        sources: Sequence[Sequence[str]],
        tokenize: Callable[P, R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call `tokenize` with limited memory, and translate panics of the library's Rust code.

        In Python, a panic is a BaseException. The library's regular expressions panic on some texts.
        """
        if exceeds_limit(self._normalizer, self._growth, sources):
            raise UntokenizableError(
                f"and the texts tokenized with it exceed {MAX_NORMALIZED_BYTES} bytes after normalization by "
                "the model's tokenizer: send shorter or fewer texts",
                is_growth=True,
            )
        try:
            return tokenize(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            text = "cannot be tokenized by the model's tokenizer: send different text, or token_ids"
            raise UntokenizableError(text, is_growth=False) from None

    def _lack_their_ends(
        self, whole: tokenizers.Encoding, encoding: tokenizers.Encoding, num_texts: int
    ) -> tuple[bool, ...]:
        """Return for each text whether its last tokens were truncated."""
        if encoding is whole or self.truncation_side == "left":
            return (False,) * num_texts
        if num_texts == 1:
            return (True,)
        before, after = whole.sequence_ids, encoding.sequence_ids
        return tuple(after.count(number) < before.count(number) for number in range(num_texts))

    def describe(self, encoded: EncodedInput) -> Tokens:
        """Describe the tokens of an input that has a record or was specified as token ids."""
        if encoded.record is not None:
            return describe(encoded.record)
        return describe_ids(encoded.input_ids, self.token_text)

    def num_prompt_tokens(self, prompt: str) -> int:
        """Return the number of leading tokens of a text that belong to the prompt.

        Like sentence-transformers, this counts the tokens of the prompt alone, without a final special token.
        """
        [encoding] = self._guarded([(prompt,)], self._counting.encode_batch, [prompt])
        return len(encoding) - sum(encoding.special_tokens_mask[-1:])

    def decode(self, input_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids. Ids that are not in the vocabulary have none."""
        return str(self._counting.decode(input_ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return the token with this id, or an empty string if the id is unknown."""
        return self._counting.id_to_token(token_id) or ""


def max_growth(normalizer: Any) -> float:  # noqa: ANN401 - the library's object
    """Return an upper bound on the number of bytes that a normalizer produces from one byte, at least 1."""
    if normalizer is None:
        return 1.0
    return _max_growth(json.loads(normalizer.__getstate__()))


def _max_growth(settings: dict[str, Any]) -> float:
    kind = settings.get("type")
    if kind == "Sequence":
        growth = 1.0
        for normalizer in settings["normalizers"]:
            growth *= _max_growth(normalizer)
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
    """Return the length of the longest replacement in a SentencePiece map: a trie, then C strings."""
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return float(max(1, *map(len, charsmap[start:].split(b"\0"))))


def exceeds_limit(normalizer: Any, growth: float, texts: Iterable[Sequence[str]]) -> bool:  # noqa: ANN401
    """Return whether the normalized texts exceed MAX_NORMALIZED_BYTES in total.

    Texts that cannot grow that much are not normalized. Other texts are normalized in slices, in bounded
    memory.
    """
    parts = [part for text in texts for part in text]
    if growth * 4 * sum(map(len, parts)) <= MAX_NORMALIZED_BYTES:  # UTF-8 has at most 4 bytes per character
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
