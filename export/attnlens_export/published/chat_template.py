"""Reads and writes the chat template into which sentence-transformers 6 inserts each text."""

from pathlib import Path
from typing import Any

from google.protobuf import json_format

from attnlens.chat_template import ChatTemplate
from attnlens.v1 import manifest_pb2 as pb
from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_object
from attnlens_export.published.modules import MODULES_FILE
from attnlens_export.published.side_files import TEMPLATE_KEY, read_sentence_config
from attnlens_publisher.errors import FailedError, MissingError, RefusedError
from attnlens_publisher.process import LIBRARIES, call

_MAX_BYTES = 4 * 10**9
_TIMEOUT_S = 120
_REMEDY = (
    "remove modality_config.message from sentence_bert_config.json in a copy of the checkpoint to use bare "
    "texts, which changes the results"
)


def render_template(source: Path | None, *, has_prompts: bool) -> dict[str, Any] | None:
    """Return the strings around each text as JSON, or None if texts are not inserted into a template.

    Args:
        source: Checkpoint directory, if any.
        has_prompts: Whether the bundle has prompts.

    Raises:
        SourceError: Bundles can't express the template, or sentence-transformers is not installed.
    """
    if source is None or not (source / MODULES_FILE).is_file():
        return None
    message = (read_sentence_config(source).get("modality_config") or {}).get("message")
    if message is None:
        return None
    try:
        found: dict[str, Any] = call(
            "attnlens_publisher.chat_template:read",
            max_bytes=_MAX_BYTES,
            timeout_s=_TIMEOUT_S,
            imports=LIBRARIES,
            source=str(source),
            message_format=message.get("format", "auto"),
            needs_prompts=has_prompts,
        )
    except MissingError as error:
        raise SourceError(
            f"the chat template of the checkpoint is rendered with {error.package}, which is not installed: "
            'pip install "attnlens[sentence-transformers]"'
        ) from error
    except (FailedError, RefusedError) as error:
        raise SourceError(f"{error}, which bundles do not support: {_REMEDY}") from error
    return found


def read_message(directory: Path) -> pb.ChatTemplate | None:
    """Return the template of a bundle as a message, or None if it has none."""
    content = read_object(directory / "config.json").get(TEMPLATE_KEY)
    return None if content is None else json_format.ParseDict(content, pb.ChatTemplate())


def read_template(directory: Path) -> ChatTemplate | None:
    """Return the template of a bundle, or None if it has none."""
    message = read_message(directory)
    return None if message is None else ChatTemplate.read(message)
