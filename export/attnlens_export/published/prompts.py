"""Prompts, the texts that go before an input: read from, and written for, sentence-transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_object, write_json

PROMPTS_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class Prompts:
    """The prompts of a model.

    Attributes:
        texts: by name; a text may be empty.
        default_name: the one that is used unless another is asked for; empty: none.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default_name: str = ""


def read_prompts(
    directory: Path | None, added: Mapping[str, str] | None = None, default_name: str | None = None
) -> Prompts:
    """Decide the prompts of a checkpoint.

    Args:
        directory: the checkpoint, whose `config_sentence_transformers.json` may have some.
        added: prompts by name that it doesn't have, or has with another text.
        default_name: the default instead of the checkpoint's; empty: none. None: the checkpoint's.

    Raises:
        SourceError: the file is broken, a prompt is no text, or the default one does not exist.
    """
    content = read_object(directory / PROMPTS_FILE) if directory else {}
    published = content.get("prompts") or {}
    if not isinstance(published, dict):
        raise SourceError(f"{PROMPTS_FILE}: prompts is a {type(published).__name__} instead of an object")
    # sentence-transformers takes null for an empty prompt.
    texts = {name: "" if text is None else text for name, text in published.items()} | dict(added or {})
    for name, text in texts.items():
        _check_text(f"the name of the prompt {name!r}", name)
        _check_text(f"the prompt {name!r}", text)
    default = (content.get("default_prompt_name") or "") if default_name is None else default_name
    if default and default not in texts:
        known = ", ".join(map(repr, texts)) or "none"
        raise SourceError(
            f"the default prompt is {default!r}, and there is {known}: add it with --prompt NAME=TEXT, or "
            "choose another with --default-prompt, '' for none"
        )
    return Prompts(texts, default)


def write_prompts(directory: Path, prompts: Prompts) -> None:
    """Write the file by which sentence-transformers knows the prompts, unless it says the same already."""
    content = read_object(directory / PROMPTS_FILE)
    said = {
        "prompts": content.get("prompts") or {},
        "default_prompt_name": content.get("default_prompt_name") or None,
    }
    settings = {"prompts": dict(prompts.texts), "default_prompt_name": prompts.default_name or None}
    if settings != said:
        write_json(directory / PROMPTS_FILE, content | settings)


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise SourceError(f"{what} is a {type(text).__name__} instead of a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{what} can't be written as UTF-8: {error}") from error
