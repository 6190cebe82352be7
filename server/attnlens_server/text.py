"""Texts to token ids, and tokens back to places in the text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tokenizers

from attnlens_server.config import ConfigError
from attnlens_server.errors import StartupError
from attnlens_server.places import keep_white_space, token_places

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

    from attnlens.v1.encoder_service_pb2 import Token


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """An input as token ids.

    Attributes:
        input_ids: (T,) int64, special tokens included.
        num_tokens_total: T before truncation.
        text: what was tokenized; None where the request gave ids.
        encoding: the tokenizer's own record, with offsets; None where the request gave ids.
        num_excluded: how many tokens at the beginning are left out of the pooling.
    """

    input_ids: npt.NDArray[np.int64]
    num_tokens_total: int
    text: str | None = None
    encoding: tokenizers.Encoding | None = None
    num_excluded: int = 0

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def without_record(self) -> "EncodedInput":
        """Return the same without the text and the tokenizer's record, which is far larger than the ids."""
        return replace(self, text=None, encoding=None)


class TextEncoder:
    """The tokenizer of a bundle. Thread-safe: the library's objects are only read after `__init__`."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        """Load `tokenizer.json`; `max_tokens` is where texts are cut.

        Raises:
            StartupError: the file is not a tokenizer.
            ConfigError: `max_tokens` leaves no room beside the special tokens.
        """
        try:
            # Two of them, since truncation is a state of the tokenizer and not of the call.
            self._counting = tokenizers.Tokenizer.from_file(str(path))
            self._truncating = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise StartupError(f"{path} is not a tokenizer: {error}") from error
        self._max_tokens = max_tokens
        for tokenizer in (self._counting, self._truncating):
            tokenizer.no_padding()
            keep_white_space(tokenizer)
        num_special = self._counting.num_special_tokens_to_add(is_pair=False)
        if max_tokens <= num_special:
            raise ConfigError(
                f"max_tokens is {max_tokens}: it must be at least {num_special + 1}, since {num_special} "
                "special tokens stand around each text"
            )
        self._counting.no_truncation()
        self._truncating.enable_truncation(max_tokens)

    def encode(self, texts: Sequence[str], *, with_offsets: bool) -> list[EncodedInput]:
        """Tokenize; texts beyond `max_tokens` are cut, which `num_tokens_total` shows."""
        encode_batch = self._counting.encode_batch if with_offsets else self._counting.encode_batch_fast
        # Always the batch calls, of one text too: they let other threads run.
        result = []
        for text, whole in zip(texts, encode_batch(list(texts)), strict=True):
            num_tokens_total = len(whole)
            is_long = num_tokens_total > self._max_tokens
            encoding = self._truncating.encode_batch([text])[0] if is_long else whole
            encoded = _encoded(text, encoding, num_tokens_total)
            result.append(encoded if with_offsets else encoded.without_record())
        return result

    def encode_whole(self, texts: Sequence[str]) -> list[EncodedInput]:
        """Tokenize without a limit."""
        encodings = self._counting.encode_batch(list(texts))
        return [_encoded(text, each, len(each)) for text, each in zip(texts, encodings, strict=True)]

    def num_prompt_tokens(self, prompt: str) -> int:
        """Return how many tokens at the beginning of a text belong to the prompt.

        As sentence-transformers counts: those of the prompt by itself, without a special token at its end.
        """
        [encoding] = self._counting.encode_batch([prompt])
        return len(encoding) - sum(encoding.special_tokens_mask[-1:])

    def token_text(self, token_id: int) -> str:
        """Return the tokenizer's spelling of an id; empty for an id that it doesn't know."""
        return self._counting.id_to_token(token_id) or ""


def _encoded(text: str, encoding: tokenizers.Encoding, num_tokens_total: int) -> EncodedInput:
    return EncodedInput(np.asarray(encoding.ids, dtype=np.int64), num_tokens_total, text, encoding)


def fill_tokens(
    tokens: "RepeatedCompositeFieldContainer[Token]", encoded: EncodedInput, text_encoder: TextEncoder | None
) -> None:
    """Describe the tokens of an input with their places in its text, in the message that will hold them.

    Inputs given as ids have a spelling where there is a tokenizer, and no places.
    """
    if encoded.encoding is None or encoded.text is None:
        spell = text_encoder.token_text if text_encoder else lambda _: ""
        for token_id in encoded.input_ids.tolist():
            tokens.add(id=token_id, text=spell(token_id))
        return
    encoding = encoded.encoding
    is_cut = encoded.num_tokens < encoded.num_tokens_total
    byte_offsets = utf8_offsets(encoded.text)
    for token_id, spelling, (start, end), word_index, is_special in zip(
        encoding.ids,
        encoding.tokens,
        token_places(encoded.text, encoding, is_cut=is_cut),
        encoding.word_ids,
        encoding.special_tokens_mask,
        strict=True,
    ):
        tokens.add(
            id=token_id,
            text=spelling,
            char_start=start,
            char_end=end,
            byte_start=byte_offsets[start],
            byte_end=byte_offsets[end],
            word_index=word_index,
            is_special=bool(is_special),
        )


def utf8_offsets(text: str) -> Sequence[int]:
    """Return, for each character offset from 0 to len(text), the byte offset in the UTF-8 text."""
    if text.isascii():
        return range(len(text) + 1)
    code_points: npt.NDArray[Any] = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + sum(code_points >= first for first in (0x80, 0x800, 0x10000))  # RFC 3629, section 3
    offsets: list[int] = np.concatenate(([0], np.cumsum(widths))).tolist()
    return offsets
