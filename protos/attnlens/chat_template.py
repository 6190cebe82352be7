"""Chat templates: strings around each text, applied as in sentence-transformers 6.

The rendered text is tokenized without special tokens. `ChatTemplate` in `manifest.proto` defines truncation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnlens.v1 import manifest_pb2 as pb

FEATURE = "chat_template"
"""Entry of `Manifest.required_features` for bundles with a template."""
_FILLERS = ("0", "1 2 3 4")


@dataclass(frozen=True, slots=True)
class Frame:
    """Strings around a text: before_prompt + prompt + before_text + text + after_text.

    Attributes:
        is_template: Whether they are rendered by a template, which includes all special tokens. If False, the
            tokenizer adds special tokens.
    """

    before_prompt: str = ""
    prompt: str = ""
    before_text: str = ""
    after_text: str = ""
    is_template: bool = False

    @property
    def before(self) -> str:
        """All strings before the text."""
        return self.before_prompt + self.prompt + self.before_text

    def around(self, text: str) -> str:
        """Return the text with the strings around it."""
        return self.before + text + self.after_text


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Template of a model.

    Attributes:
        without_prompt: Strings around a text without a prompt.
        with_prompt: Strings around a text with a prompt. None if the template does not support prompts.
    """

    without_prompt: Frame
    with_prompt: Frame | None = None

    @classmethod
    def read(cls, message: pb.ChatTemplate) -> "ChatTemplate":
        """Return the template that a message describes."""
        without, having = message.without_prompt, message.with_prompt
        return cls(_read_frame(without), _read_frame(having) if message.HasField("with_prompt") else None)

    def frame(self, prompt: str) -> Frame:
        """Return the strings around a text with a prompt, which may be empty.

        Raises:
            ValueError: The template does not support prompts.
        """
        frame = self.with_prompt if prompt else self.without_prompt
        if frame is None:
            raise ValueError("the chat template does not support prompts")
        return replace(frame, prompt=prompt)


def _read_frame(message: pb.TextFrame) -> Frame:
    return Frame(message.before_prompt, "", message.before_text, message.after_text, is_template=True)


def frame_of(template: ChatTemplate | None, prompt: str) -> Frame:
    """Return the strings around a text with a prompt: those of the template, or the prompt alone."""
    return Frame(prompt=prompt) if template is None else template.frame(prompt)


def encode_end(tokenizer: Any, frame: Frame) -> Any:  # noqa: ANN401 - classes of the package tokenizers
    """Return the `Encoding` of the end of a template, as sentence-transformers finds it. None if it has none.

    Args:
        tokenizer: `Tokenizer` without truncation and padding.
        frame: Strings of the template around a text.
    """
    first, second = (tokenizer.encode(frame.around(text), add_special_tokens=False) for text in _FILLERS)
    count = _count_equal(first.ids[::-1], second.ids[::-1])
    if not 0 < count < min(len(first), len(second)):
        return None
    first.truncate(count, direction="left")
    return first


def replace_end(encoding: Any, end: Any) -> Any:  # noqa: ANN401 - as above
    """Return an `Encoding` whose last tokens are replaced by those of `end`. Modifies both arguments."""
    if len(end) > len(encoding):
        end.truncate(len(encoding), direction="left")
    encoding.truncate(len(encoding) - len(end))
    return encoding.merge([encoding, end], growing_offsets=False)


def _count_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal items at the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
