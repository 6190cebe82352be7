"""Renders the chat template of a checkpoint, and finds the fixed strings around each text."""

from collections.abc import Callable, Sequence
from typing import Any

from attnlens_publisher.errors import RefusedError
from attnlens_publisher.process import Report

Render = Callable[[str, str], str]
"""Returns a text, with its system message or "", in the template."""

MAX_CHARS = 4096
_MAX_SHOWN = 100
_CLOCK = "strftime_now"  # the only function with which a template can read a clock
_MARKED_TEXT, _MARKED_PROMPT = "xqzv7text", "xqzv7prompt"
# Texts that a template could strip, escape, or treat in another way.
TEXTS = (
    "",
    "a",
    " outer spaces ",
    "\n\nlines\n between\n",
    "\ttabs\tand returns\r\n",
    "{{ braces }} {% if true %} {# comment #} {0}",
    "<b>&amp; \"quotes\" and 'apostrophes'</b>",
    "back\\slash \\n",
    "Zürich, e\u0301, 東京, שלום, \U0001f469\u200d\U0001f467",
    "<think>a thought</think> an answer /no_think",
    "system\nuser: assistant: [INST] << SYS >>",
    "word " * 500,
)


def read(
    _report: Report, *, source: str, message_format: str, needs_prompts: bool
) -> dict[str, dict[str, str]]:
    """Return the strings around each text.

    Args:
        source: Checkpoint directory.
        message_format: Form of messages that sentence-transformers passes: "flat", "structured" or "auto".
        needs_prompts: Whether the checkpoint has prompts.

    Returns:
        `ChatTemplate` of the manifest as JSON.

    Raises:
        RefusedError: The template is missing, reads a clock, is too long, or does not insert each text
            unchanged between fixed strings.
        ImportError: sentence-transformers is not installed.
    """
    import transformers  # noqa: PLC0415 - imported by the worker
    from sentence_transformers.base.modality import InputFormatter  # noqa: PLC0415 - as above

    load: Any = transformers.AutoProcessor
    tokenizer = load.from_pretrained(source, trust_remote_code=False)
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        raise RefusedError(
            f"the chat template is that of a {type(tokenizer).__name__} for other inputs than texts"
        )
    if not tokenizer.chat_template:
        raise RefusedError("texts are inserted into a chat template, but the tokenizer has none")
    if _CLOCK in str(tokenizer.get_chat_template()):
        raise RefusedError(
            f"the chat template reads the clock ({_CLOCK}), so that results depend on the date"
        )
    model_type = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False).model_type
    formatter = InputFormatter(model_type, message_format, tokenizer)  # type: ignore[arg-type]

    def render(text: str, prompt: str) -> str:
        _, inputs = formatter.batch_to_message("text", {"text": [text]})
        messages = inputs["message"]
        if prompt:
            messages = formatter.prepend_prompt_to_messages(messages, prompt)
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False)[0])
        except Exception as error:
            raise RefusedError(f"the chat template fails for {_show(text)} ({error})") from error

    texts = [*TEXTS, *(f"a{token} {token}b" for token in tokenizer.all_special_tokens)]
    found = {"without_prompt": _find_frame(render, texts, [""])}
    try:
        found["with_prompt"] = _find_frame(render, texts, [text for text in texts if text])
    except RefusedError as error:
        if needs_prompts:
            raise RefusedError(
                f"the checkpoint has prompts, which become system messages: {error}"
            ) from error
    return found


def _find_frame(render: Render, texts: Sequence[str], prompts: Sequence[str]) -> dict[str, str]:
    """Return the strings around a text and a prompt, which are "" if all prompts are empty.

    Raises:
        RefusedError: A rendering has other strings, or is another one the second time.
    """
    has_prompt = prompts != [""]
    rendered = render(_MARKED_TEXT, _MARKED_PROMPT if has_prompt else "")
    before, *after = rendered.split(_MARKED_TEXT)
    first, *second = before.split(_MARKED_PROMPT)
    if len(after) != 1 or len(second) != has_prompt:
        raise RefusedError(f"the chat template renders {_show(_MARKED_TEXT)} as {_show(rendered)}")
    frame = {
        "before_prompt": first if has_prompt else "",
        "before_text": second[0] if has_prompt else first,
        "after_text": after[0],
    }
    if sum(map(len, frame.values())) > MAX_CHARS:
        raise RefusedError(f"the chat template adds more than {MAX_CHARS} characters to each text")
    for number in range(2 * len(texts)):
        text, prompt = texts[number % len(texts)], prompts[number % len(prompts)]
        expected = frame["before_prompt"] + prompt + frame["before_text"] + text + frame["after_text"]
        if (rendered := render(text, prompt)) != expected:
            raise RefusedError(
                "the chat template does not insert each text unchanged between fixed strings: it renders "
                f"{_show(text)} as {_show(rendered)} instead of {_show(expected)}"
            )
    return frame


def _show(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "...")
