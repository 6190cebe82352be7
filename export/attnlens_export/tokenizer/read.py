"""Tokenizes texts as a server does: with prompts, the chat template, and truncation."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from attnlens.chat_template import encode_end, frame_of, replace_end
from attnlens_export.published.chat_template import read_template


class BundleTokenizer:
    """The tokenizer of a bundle. It does not pad.

    Args:
        path: `tokenizer.json` of the bundle, next to its `config.json`.
        max_tokens: Maximum number of tokens of a text.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        self._whole, self._truncating = (Tokenizer.from_file(str(path)) for _ in range(2))
        for tokenizer in (self._whole, self._truncating):
            tokenizer.no_padding()
        self._whole.no_truncation()
        side = (self._truncating.truncation or {}).get("direction", "right")
        self._truncating.enable_truncation(max_tokens, direction=side)
        self._max_tokens = max_tokens
        self._template = read_template(path.parent)

    def encode(self, texts: Sequence[str | tuple[str, str]], prompt: str = "") -> list[Encoding]:
        """Tokenize and truncate texts or pairs with a prompt."""
        frame = frame_of(self._template, prompt)
        sources = [
            frame.around(text) if isinstance(text, str) else (frame.around(text[0]), text[1])
            for text in texts
        ]
        encodings: list[Encoding] = self._truncating.encode_batch(
            sources, add_special_tokens=not frame.is_template
        )
        if not frame.is_template:
            return encodings
        return [
            encoding
            if len(encoding) < self._max_tokens or (end := encode_end(self._whole, frame)) is None
            else replace_end(encoding, end)
            for encoding in encodings
        ]

    def num_prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt, counted like a server, or those of a chat template."""
        frame = frame_of(self._template, prompt)
        if not frame.around(""):
            return 0
        encoding = self._whole.encode(frame.around(""), add_special_tokens=not frame.is_template)
        return len(encoding) - sum(encoding.special_tokens_mask[-1:])

    def select_text(self, encoding: Encoding, text: str | Sequence[str]) -> list[int]:
        """Return the indices of the tokens that are not special and not part of the chat template.

        Args:
            encoding: Tokens of `text` without a prompt.
            text: The text or pair.
        """
        if self._template is None or not isinstance(text, str):
            return [row for row, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
        frame = self._template.frame("")
        end = encode_end(self._whole, frame)
        start = len(frame.before)
        kept = encoding.offsets[: len(encoding) - (0 if end is None else len(end))]
        return [row for row, (first, last) in enumerate(kept) if last > start and first < start + len(text)]
