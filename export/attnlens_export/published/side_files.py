"""Reads and writes the files next to the graphs: configuration, tokenizer and license."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from attnlens_export.errors import SourceError
from attnlens_export.json_files import read_object, write_json
from attnlens_export.tokenizer.build import build_tokenizer, tokenizer_class
from attnlens_model import EncoderConfig, read_config
from attnlens_model.checkpoint.tensor_files import check_not_lfs_pointer

TASK_KEY = "attnlens_adapter_task"
"""Key in a bundle's `config.json` for the task whose adapters were merged into the weights."""

_SPECIAL_TOKENS = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "bos_token", "eos_token")
_TRUNCATION = {"strategy": "LongestFirst", "stride": 0}
_COPIED_FILES = ("vocab.txt",)
_EMBEDDERS_FILES = ("config_sentence_transformers.json",)

SENTENCE_CONFIG = "sentence_bert_config.json"
"""File name of the settings of sentence-transformers' Transformer module."""
# In the order in which sentence-transformers tries them. Early releases named the file after the encoder.
_SENTENCE_CONFIGS = (
    SENTENCE_CONFIG,
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert")),
    *(f"sentence_{kind}_config.json" for kind in ("xlm-roberta", "xlnet")),
)
# Tokenizer classes whose arguments replace fields of `BertNormalizer`: field -> (argument, its default).
_BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
_BERT_FIELDS = {
    "lowercase": ("do_lower_case", True),
    "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}


def write_config(
    directory: Path,
    source: Path | None,
    config: EncoderConfig,
    *,
    external_data: bool,
    adapter_task: str = "",
) -> None:
    """Write `config.json` with the checkpoint's Hugging Face keys and the keys that tools require.

    Args:
        directory: Bundle directory.
        source: Checkpoint directory, or None for a newly initialized encoder.
        config: Encoder configuration.
        external_data: Whether the weights are stored outside the ONNX files. transformers.js reads this flag.
        adapter_task: Task whose adapters were merged into the weights. Empty without adapters.

    Raises:
        SourceError: A Hugging Face `config.json` can't represent the configuration.
    """
    published = read_object(source / "config.json") if source else {}
    text = published.get("text_config")
    if isinstance(text, dict):
        # For a multimodal model, the bundle contains only the text encoder.
        published = text
    content = config.to_hugging_face() if "model_type" not in published else published
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
    if adapter_task:
        content[TASK_KEY] = adapter_task
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


def write_tokenizer(
    directory: Path, source: Path | None, tokenizer: Path | None, config: EncoderConfig, max_tokens: int
) -> str:
    """Write the tokenizer, with truncation at `max_tokens` and no padding, and its settings files.

    If the checkpoint lacks `tokenizer.json`, it is built from the vocabulary. Without a tokenizer, nothing is
    written.

    Args:
        directory: Bundle directory.
        source: Checkpoint directory, if any.
        tokenizer: A `tokenizer.json` to use instead of the checkpoint's.
        config: Encoder configuration. Its vocabulary must include every token id.
        max_tokens: Maximum input length.

    Returns:
        A description of the tokenizer if it was built, otherwise an empty string.

    Raises:
        SourceError: The tokenizer is invalid, can't be built or has ids outside the vocabulary.
    """
    path = tokenizer or (source / "tokenizer.json" if source else None)
    built = build_tokenizer(path.parent) if path and not tokenizer and not path.exists() else None
    if built:
        loaded, content = built.tokenizer, json.loads(built.tokenizer.to_str())
        check_ids(loaded, str(source), config)
    elif path and (tokenizer or path.exists()):
        loaded, content = load_tokenizer(path, config), read_object(path)
        if tokenizer is None:
            _check_end_token(path, loaded)
    else:
        return ""
    # Published truncation and padding settings are often left over from training. Override them so that all
    # libraries tokenize as the server does. A custom tokenizer does not use the checkpoint's settings.
    described_by = source if tokenizer is None else None
    settings = read_object(described_by / "tokenizer_config.json") if described_by else {}
    direction = _truncation_side(settings, content).capitalize()
    limits = {"truncation": {"direction": direction, "max_length": max_tokens} | _TRUNCATION, "padding": None}
    normalizer = content.get("normalizer")
    if described_by and not built:
        normalizer = _with_class_settings(normalizer, described_by, settings)
    if read_object(directory / SENTENCE_CONFIG).get("do_lower_case"):
        normalizer = _lowercased(normalizer)
    write_json(directory / "tokenizer.json", content | limits | {"normalizer": normalizer})
    special = read_object(described_by / "special_tokens_map.json") if described_by else {}
    special = special or {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name)}
    special = (built.special_tokens if built else {}) | special
    special.setdefault("pad_token", loaded.id_to_token(config.embeddings.pad_token_id) or "[PAD]")
    settings.setdefault("pad_token", special["pad_token"])
    # transformers, transformers.js and fastembed truncate at `model_max_length` and ignore tokenizer.json.
    # fastembed also truncates at `max_length`, which may be left over from an earlier call.
    settings.pop("max_length", None)
    settings["model_max_length"] = max_tokens
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "special_tokens_map.json", special)
    return built.description if built else ""


def _truncation_side(settings: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return "right" or "left": the side on which transformers, and so sentence-transformers, truncates.

    Args:
        settings: The content of `tokenizer_config.json`, which takes precedence.
        content: The content of `tokenizer.json`.

    Raises:
        SourceError: The side is neither right nor left.
    """
    stated = (content.get("truncation") or {}).get("direction", "right")
    side = str(settings.get("truncation_side", stated)).lower()
    if side not in ("right", "left"):
        raise SourceError(
            f"truncation_side is {side!r} in tokenizer_config.json: it must be 'right' or 'left'"
        )
    return side


def _with_class_settings(
    normalizer: dict[str, Any] | None, source: Path, settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the normalizer of `tokenizer.json` with the settings of `tokenizer_config.json` applied.

    The BERT tokenizers of transformers 4 and 5 override these normalizer fields with their own arguments,
    whose defaults apply if `tokenizer_config.json` does not set them.
    """
    is_bert = tokenizer_class(source, settings) in _BERT_CLASSES
    if not is_bert or normalizer is None or normalizer["type"] != "BertNormalizer":
        return normalizer
    return normalizer | {field: settings.get(key, default) for field, (key, default) in _BERT_FIELDS.items()}


def _lowercased(normalizer: dict[str, Any] | None) -> dict[str, Any]:
    """Return a normalizer of `tokenizer.json` that lowercases first, as sentence-transformers does.

    With `do_lower_case`, it prepends a `Lowercase` step unless the normalizer already contains that step.
    """
    steps = [] if normalizer is None else [normalizer]
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    lowercase = {"type": "Lowercase"}
    return {"type": "Sequence", "normalizers": steps if lowercase in steps else [lowercase, *steps]}


def load_tokenizer(path: Path, config: EncoderConfig) -> Tokenizer:
    """Load a `tokenizer.json` and check its ids against the encoder's vocabulary.

    Raises:
        SourceError: The file is invalid or empty, or an id is too large for the encoder.
        CheckpointError: The file is a Git LFS pointer.
    """
    if path.is_file():
        check_not_lfs_pointer(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise SourceError(f"{path} is not a tokenizer: {error}") from error
    check_ids(tokenizer, str(path), config)
    return tokenizer


def _check_end_token(path: Path, tokenizer: Tokenizer) -> None:
    """Reject a `tokenizer.json` that adds no end token although `tokenizer_config.json` specifies one.

    transformers 5 adds no end token in this case, but older versions (for some classes) and custom code do.
    The last token, which last-token pooling uses, would be ambiguous.

    Raises:
        SourceError: The two files disagree about the end token.
    """
    settings = read_object(path.parent / "tokenizer_config.json")
    token = settings.get("eos_token")
    spelled = token.get("content") if isinstance(token, dict) else token
    if settings.get("add_eos_token") is not True or not isinstance(spelled, str):
        return
    if tokenizer.encode("a").ids[-1:] != [tokenizer.token_to_id(spelled)]:
        raise SourceError(
            f"tokenizer_config.json in {path.parent} sets add_eos_token, but tokenizer.json does not append "
            f"{spelled}, and versions of transformers disagree on which one applies: set add_eos_token to "
            "false for texts without this token, or pass a tokenizer.json whose post-processor appends it "
            "with --tokenizer"
        )


def check_ids(tokenizer: Tokenizer, source: str, config: EncoderConfig) -> None:
    """Check the ids of the tokenizer from `source` against the encoder's vocabulary.

    Raises:
        SourceError: The vocabulary is empty, or an id is too large for the encoder.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise SourceError(f"{source} has an empty vocabulary: specify another tokenizer with --tokenizer")
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= config.embeddings.vocab_size:
        raise SourceError(
            f"{source} has the id {largest} ({token!r}), but the encoder only supports ids below "
            f"vocab_size={config.embeddings.vocab_size}: the tokenizer belongs to another model"
        )


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
