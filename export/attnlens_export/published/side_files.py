"""Reads and writes the files next to the graphs: configuration, limits and license."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_object, write_json
from attnlens_model import EncoderConfig, read_config
from attnlens_publisher.tokenizer import CHOICE_KEY

TASK_KEY = "attnlens_adapter_task"
"""Key in a bundle's `config.json` for the task whose adapters were merged into the weights."""
TEMPLATE_KEY = "attnlens_chat_template"
"""Key in a bundle's `config.json` for the strings of the chat template around each text."""

_COPIED_FILES = ("vocab.txt",)
_EMBEDDERS_FILES = ("config_sentence_transformers.json", "chat_template.jinja")

SENTENCE_CONFIG = "sentence_bert_config.json"
"""File name of the settings of sentence-transformers' Transformer module."""
# In the order in which sentence-transformers tries them. Early releases named the file after the encoder.
_SENTENCE_CONFIGS = (
    SENTENCE_CONFIG,
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert")),
    *(f"sentence_{kind}_config.json" for kind in ("xlm-roberta", "xlnet")),
)


def write_config(
    directory: Path,
    source: Path | None,
    config: EncoderConfig,
    *,
    external_data: bool,
    own: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write `config.json` with the checkpoint's Hugging Face keys and the keys that tools require.

    Args:
        directory: Bundle directory.
        source: Checkpoint directory, or None for a newly initialized encoder.
        config: Encoder configuration.
        external_data: Whether the weights are stored outside the ONNX files. transformers.js reads this flag.
        own: Values of `TASK_KEY` and `TEMPLATE_KEY`. Empty values are omitted.

    Raises:
        SourceError: A Hugging Face `config.json` can't represent the configuration.
    """
    published = read_object(source / "config.json") if source else {}
    text = published.get("text_config")
    if isinstance(text, dict):
        # For a multimodal model, the bundle contains only the text encoder.
        published = text
    content = config.to_hugging_face() if "model_type" not in published else published
    if not config.is_published_module:  # whose keys may have other names
        content |= {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": config.positions.max_position_embeddings,
            "pad_token_id": config.embeddings.pad_token_id,
        }
        # Keep a published value even if it differs: NeoBERT's is 1.5 times the actual size.
        content.setdefault("intermediate_size", config.intermediate_size)
    # Keys specific to attnlens, such as choices made at export.
    content |= {key: value for key, value in config.to_hugging_face().items() if key.startswith("attnlens_")}
    # Values of a bundle that is exported again do not apply.
    content = {key: value for key, value in content.items() if key not in (TASK_KEY, TEMPLATE_KEY)}
    content |= {key: value for key, value in own.items() if value}
    if external_data:
        content["transformers.js_config"] = {"use_external_data_format": True}
    write_json(directory / "config.json", content)
    read_back = read_config(directory / "config.json").by_path()
    lost = [f"{path}={value!r}" for path, value in config.by_path().items() if read_back.get(path) != value]
    if lost:
        raise SourceError(
            f"a Hugging Face config.json of the {config.family} family cannot express {', '.join(lost)}: "
            "choose another family"
        )


def read_task(directory: Path) -> str:
    """Return the adapter task in a bundle's `config.json`, or an empty string if it is not set."""
    task = read_object(directory / "config.json").get(TASK_KEY)
    return task if isinstance(task, str) else ""


def read_tokenizer_choice(directory: Path) -> str:
    """Return "published" or "transformers" if the export of a bundle chose its token ids, else ""."""
    choice = read_object(directory / "tokenizer_config.json").get(CHOICE_KEY)
    return choice if isinstance(choice, str) else ""


def copy_described(directory: Path, source: Path | None, *, is_embedder: bool = True) -> None:
    """Copy the files of a checkpoint that a bundle uses unchanged.

    Args:
        directory: Bundle directory.
        source: Checkpoint directory, if any.
        is_embedder: Whether to include the sentence-transformers settings.
    """
    names = (*_COPIED_FILES, *_EMBEDDERS_FILES) if is_embedder else _COPIED_FILES
    for path in sorted(source.iterdir()) if source else ():
        if path.is_file() and (path.name in names or path.name.startswith("LICENSE")):
            shutil.copyfile(path, directory / path.name)
    settings = read_sentence_config(source) if source and is_embedder else {}
    # Arguments repeat settings of other files, see `check_settings`. The bundle has its own files.
    settings = {key: value for key, value in settings.items() if not key.endswith(("_args", "_kwargs"))}
    if settings:
        write_json(directory / SENTENCE_CONFIG, settings)


def read_sentence_config(directory: Path) -> dict[str, Any]:
    """Return the settings of sentence-transformers' Transformer module, from the file that it would read.

    Raises:
        SourceError: The file is invalid.
    """
    path = find_sentence_config(directory)
    return read_object(path) if path else {}


def find_sentence_config(directory: Path) -> Path | None:
    """Return the path of the file that `read_sentence_config` reads, or None if there is none.

    Raises:
        SourceError: The file is invalid.
    """
    return next((directory / name for name in _SENTENCE_CONFIGS if read_object(directory / name)), None)


def read_max_tokens(source: Path | None, config: EncoderConfig) -> int:
    """Return the publisher's token limit, including special tokens, capped at the encoder's maximum.

    As in sentence-transformers, `max_seq_length` replaces the limit of the tokenizer, even by a larger one.
    """
    stated = read_sentence_config(source).get("max_seq_length") if source else None
    if stated is None and source:
        stated = read_object(source / "tokenizer_config.json").get("model_max_length")
    # "No limit" is written as a huge number, a float, null or not at all.
    return min(config.max_tokens, stated) if isinstance(stated, int) and stated > 0 else config.max_tokens


def read_license(source: Path | None) -> str:
    """Return the license in the YAML header of the checkpoint's README, or an empty string."""
    readme = source / "README.md" if source else None
    if readme is None or not readme.exists():
        return ""
    lines = readme.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in lines[1:]:
        return ""
    header = lines[1 : lines.index("---", 1)]
    stated = {key: value.strip(" '\"") for key, _, value in (line.partition(":") for line in header)}
    name = stated.get("license", "")
    return stated.get("license_name", name) if name == "other" else name
