"""The tokenizer of a bundle: texts and pairs to token ids."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from attnlens_server.config import ConfigError
from attnlens_server.errors import StartupError
from attnlens_server.text.places import keep_white_space
from attnlens_server.text.tokens import EncodedInput, Record, Tokens, describe, describe_ids


class TextEncoder:
    """The tokenizer of a bundle. Thread-safe: the library's objects are only read after `__init__`.

    Attributes:
        max_tokens: where texts are cut.
        takes_pairs: whether `max_tokens` leaves room beside the special tokens of a pair.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        """Load `tokenizer.json`.

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
        self.max_tokens = max_tokens
        for tokenizer in (self._counting, self._truncating):
            tokenizer.no_padding()
            keep_white_space(tokenizer)
        num_special = self._counting.num_special_tokens_to_add(is_pair=False)
        if max_tokens <= num_special:
            raise ConfigError(
                f"max_tokens is {max_tokens}: it must be at least {num_special + 1}, since {num_special} "
                "special tokens stand around each text"
            )
        self.takes_pairs = max_tokens > self._counting.num_special_tokens_to_add(is_pair=True)
        self._counting.no_truncation()
        self._truncating.enable_truncation(
            max_tokens
        )  # as transformers does: the longer text of a pair first

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
            texts: (text,) or (text, second text) each.
            prompt: is put before each, before the first of a pair.
            with_record: keep the tokenizer's record, which `describe` needs.
            truncate: cut what is beyond `max_tokens`, which `num_tokens_total` shows.
        """
        sources = [(prompt + first, *rest) for first, *rest in texts]
        encode_batch = self._counting.encode_batch if with_record else self._counting.encode_batch_fast
        # Always the batch calls, of one text too: they let other threads run.
        wholes = encode_batch([source if len(source) > 1 else source[0] for source in sources])
        result = []
        for text, source, whole in zip(texts, sources, wholes, strict=True):
            encoding = whole
            if truncate and len(whole) > self.max_tokens:
                [encoding] = self._truncating.encode_batch([source if len(source) > 1 else source[0]])
            record = (
                Record(encoding, prompt, text, _are_cut(whole, encoding, len(text))) if with_record else None
            )
            type_ids = np.asarray(encoding.type_ids, np.int64) if len(text) > 1 else None
            input_ids = np.asarray(encoding.ids, dtype=np.int64)
            result.append(EncodedInput(input_ids, len(whole), token_type_ids=type_ids, record=record))
        return result

    def describe(self, encoded: EncodedInput) -> Tokens:
        """Describe the tokens of an input that has its record, or was given as ids."""
        if encoded.record is not None:
            return describe(encoded.record)
        return describe_ids(encoded.input_ids, self.token_text)

    def num_prompt_tokens(self, prompt: str) -> int:
        """Return how many tokens at the beginning of a text belong to the prompt.

        As sentence-transformers counts: those of the prompt by itself, without a special token at its end.
        """
        [encoding] = self._counting.encode_batch([prompt])
        return len(encoding) - sum(encoding.special_tokens_mask[-1:])

    def token_text(self, token_id: int) -> str:
        """Return the tokenizer's spelling of an id; empty for an id that it doesn't know."""
        return self._counting.id_to_token(token_id) or ""


def _are_cut(whole: tokenizers.Encoding, encoding: tokenizers.Encoding, num_texts: int) -> tuple[bool, ...]:
    """Return for each text whether tokens of it were cut off."""
    if encoding is whole:
        return (False,) * num_texts
    if num_texts == 1:
        return (True,)
    before, after = whole.sequence_ids, encoding.sequence_ids
    return tuple(after.count(number) < before.count(number) for number in range(num_texts))
