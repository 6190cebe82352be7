"""Reads and writes sentence-transformers prompts, the strings prepended to a text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnlens.similarity import Similarity
from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_object, write_json

PROMPTS_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class Prompts:
    """The prompts of a model.

    Attributes:
        texts: Prompt texts by name. A text may be empty.
        default_name: Name of the default prompt, or an empty string for no default.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default_name: str = ""


def read_prompts(
    directory: Path | None, added: Mapping[str, str] | None = None, default_name: str | None = None
) -> Prompts:
    """Return the prompts of a checkpoint.

    Args:
        directory: Checkpoint directory, which may contain `config_sentence_transformers.json`.
        added: Prompts by name. They override the checkpoint's prompts.
        default_name: Name of the default prompt, or an empty string for no default. If None, the checkpoint's
            default is used.

    Raises:
        SourceError: The file or a prompt is invalid, or the default prompt does not exist.
    """
    content = read_object(directory / PROMPTS_FILE) if directory else {}
    published = content.get("prompts") or {}
    if not isinstance(published, dict):
        raise SourceError(f"{PROMPTS_FILE}: prompts must be an object, not {type(published).__name__}")
    # sentence-transformers treats null as an empty prompt.
    texts = {name: "" if text is None else text for name, text in published.items()} | dict(added or {})
    for name, text in texts.items():
        _check_text(f"the name of the prompt {name!r}", name)
        _check_text(f"the prompt {name!r}", text)
    default = (content.get("default_prompt_name") or "") if default_name is None else default_name
    if default and default not in texts:
        known = ", ".join(map(repr, texts)) or "none"
        raise SourceError(
            f"the default prompt is {default!r}, but the prompts are {known}: add it with "
            "--prompt NAME=TEXT, or choose another with --default-prompt, '' for none"
        )
    return Prompts(texts, default)


def read_similarity(directory: Path) -> Similarity:
    """Return the function that compares the embeddings of a bundle."""
    name = read_object(directory / PROMPTS_FILE).get("similarity_fn_name")
    return Similarity.COSINE if name is None else Similarity[str(name).upper()]


def write_prompts(directory: Path, prompts: Prompts, similarity: str | None = None) -> None:
    """Write the prompts for sentence-transformers unless the file is already up to date.

    Args:
        directory: Bundle directory.
        prompts: Prompts of the bundle.
        similarity: Similarity function that replaces the publisher's. If None, the publisher's is kept.
    """
    content = read_object(directory / PROMPTS_FILE)
    current = {
        "prompts": content.get("prompts") or {},
        "default_prompt_name": content.get("default_prompt_name") or None,
    }
    settings = {"prompts": dict(prompts.texts), "default_prompt_name": prompts.default_name or None}
    if similarity is not None:
        current["similarity_fn_name"] = content.get("similarity_fn_name")
        settings["similarity_fn_name"] = similarity
    if settings != current:
        write_json(directory / PROMPTS_FILE, content | settings)


def _check_text(subject: str, text: object) -> None:
    if not isinstance(text, str):
        raise SourceError(f"{subject} must be a string, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{subject} can't be encoded as UTF-8: {error}") from error
