"""The tokenizer of a bundle: texts and pairs to token ids."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from attnlens_server.config import ConfigError
from attnlens_server.errors import StartupError
from attnlens_server.text.growth import MAX_GROWTH, MAX_NORMALIZED_BYTES, exceeds_limit, max_growth
from attnlens_server.text.places import keep_white_space
from attnlens_server.text.tokens import EncodedInput, Record, Tokens, describe, describe_ids

_REMEDY = "export the bundle again, with the tokenizer that belongs to the model"
_MAX_PROBE_TOKENS = 64  # of one letter; byte-level tokenizers make a few


class UntokenizableError(Exception):
    """Texts can't be tokenized. The message follows the name of a text.

    Attributes:
        is_growth: Whether the texts are too long together. Otherwise the tokenizer fails at one of them.
    """

    def __init__(self, message: str, *, is_growth: bool) -> None:
        super().__init__(message)
        self.is_growth = is_growth


class TextEncoder:
    """The tokenizer of a bundle. Thread-safe: the library's objects are only read after `__init__`.

    Attributes:
        max_tokens: where texts are cut.
        truncation_side: "left" if the beginning of a long text is cut off, "right" if its end is.
        takes_pairs: whether `max_tokens` leaves room beside the special tokens of a pair.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        """Load `tokenizer.json`.

        Raises:
            StartupError: the file is not a tokenizer, or makes too much of a text.
            ConfigError: `max_tokens` leaves no room beside the special tokens.
        """
        try:
            # Two of them, since truncation is a state of the tokenizer and not of the call.
            self._counting = tokenizers.Tokenizer.from_file(str(path))
            self._truncating = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise StartupError(f"{path} is not a tokenizer: {error}") from error
        self.max_tokens = max_tokens
        self._normalizer: Any = self._counting.normalizer
        self._growth = max_growth(self._normalizer)
        if self._growth > MAX_GROWTH:
            raise StartupError(
                f"{path} can make {self._growth:.0f} bytes of one in its normalizer, the limit is "
                f"{MAX_GROWTH}: {_REMEDY}"
            )
        for tokenizer in (self._counting, self._truncating):
            tokenizer.no_padding()
            keep_white_space(tokenizer)
        num_special = self._counting.num_special_tokens_to_add(is_pair=False)
        if max_tokens <= num_special:
            raise ConfigError(
                f"max_tokens is {max_tokens}: it must be at least {num_special + 1}, since {num_special} "
                "special tokens stand around each text"
            )
        self._path = path
        self.takes_pairs = max_tokens > self._counting.num_special_tokens_to_add(is_pair=True)
        self._counting.no_truncation()
        self.truncation_side = str((self._truncating.truncation or {}).get("direction", "right"))
        # The default strategy truncates the longer text of a pair first, as transformers does.
        self._truncating.enable_truncation(max_tokens, direction=self.truncation_side)

    def check_ids(self, vocab_size: int) -> None:
        """Check the ids of the vocabulary, and of special tokens, which `tokenizer.json` states separately.

        Raises:
            StartupError: an id is not below `vocab_size`, or one letter has many tokens.
        """
        path = self._path
        with self._guarded([("a",)]):
            single, pair = self._counting.encode_batch(["a", ("a", "a")])
        vocabulary = self._counting.get_vocab(with_added_tokens=True)
        largest = max(*vocabulary.values(), *single.ids, *pair.ids, 0)
        if largest >= vocab_size:
            raise StartupError(
                f"{path} has the id {largest}, and the model only ids below {vocab_size}: {_REMEDY}"
            )
        if len(single) - self._counting.num_special_tokens_to_add(is_pair=False) > _MAX_PROBE_TOKENS:
            raise StartupError(
                f"{path} makes {len(single)} tokens of one letter, the limit is {_MAX_PROBE_TOKENS}: "
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
            texts: (text,) or (text, second text) each.
            prompt: is put before each, before the first of a pair.
            with_record: keep the tokenizer's record, which `describe` needs.
            truncate: cut what is beyond `max_tokens`, which `num_tokens_total` shows.

        Raises:
            UntokenizableError: The tokenizer fails, or its normalizer makes too much of the texts.
        """
        sources = [(prompt + first, *rest) for first, *rest in texts]
        encode_batch = self._counting.encode_batch if with_record else self._counting.encode_batch_fast
        # Always the batch calls, of one text too: they let other threads run.
        with self._guarded(sources):
            wholes = encode_batch([source if len(source) > 1 else source[0] for source in sources])
        result = []
        for text, source, whole in zip(texts, sources, wholes, strict=True):
            encoding = whole
            if truncate and len(whole) > self.max_tokens:
                [encoding] = self._truncating.encode_batch([source if len(source) > 1 else source[0]])
            record = (
                Record(encoding, prompt, text, self._lack_their_ends(whole, encoding, len(text)))
                if with_record
                else None
            )
            type_ids = np.asarray(encoding.type_ids, np.int64) if len(text) > 1 else None
            input_ids = np.asarray(encoding.ids, dtype=np.int64)
            result.append(EncodedInput(input_ids, len(whole), token_type_ids=type_ids, record=record))
        return result

    @contextmanager
    def _guarded(self, sources: Sequence[Sequence[str]]) -> Iterator[None]:
        """Limit the memory of tokenizing in the block, and translate a panic of the library's Rust code.

        A panic is not an Exception for Python. Regular expressions give up on some texts that way.
        """
        if exceeds_limit(self._normalizer, self._growth, sources):
            raise UntokenizableError(
                f"and the texts with it have more than {MAX_NORMALIZED_BYTES} bytes once the model's "
                "tokenizer has normalized them: send shorter texts, or fewer at a time",
                is_growth=True,
            )
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            text = "makes the model's tokenizer fail: send other text, or token_ids"
            raise UntokenizableError(text, is_growth=False) from None

    def _lack_their_ends(
        self, whole: tokenizers.Encoding, encoding: tokenizers.Encoding, num_texts: int
    ) -> tuple[bool, ...]:
        """Return for each text whether tokens at its end were cut off."""
        if encoding is whole or self.truncation_side == "left":
            return (False,) * num_texts
        if num_texts == 1:
            return (True,)
        before, after = whole.sequence_ids, encoding.sequence_ids
        return tuple(after.count(number) < before.count(number) for number in range(num_texts))

    def describe(self, encoded: EncodedInput) -> Tokens:
        """Describe the tokens of an input that has its record, or was given as ids."""
        if encoded.record is not None:
            return describe(encoded.record)
        return describe_ids(encoded.input_ids, self.token_text)

    def num_prompt_tokens(self, prompt: str) -> int:
        """Return how many tokens at the beginning of a text belong to the prompt.

        As sentence-transformers counts: those of the prompt by itself, without a special token at its end.
        """
        with self._guarded([(prompt,)]):
            [encoding] = self._counting.encode_batch([prompt])
        return len(encoding) - sum(encoding.special_tokens_mask[-1:])

    def token_text(self, token_id: int) -> str:
        """Return the tokenizer's spelling of an id; empty for an id that it doesn't know."""
        return self._counting.id_to_token(token_id) or ""
