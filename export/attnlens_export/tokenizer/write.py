"""Writes the tokenizer of a bundle: that of the checkpoint as transformers reads it, or a given file."""

import json
from pathlib import Path
from typing import Any, get_args

from tokenizers import Tokenizer

from attnlens_export.errors import SourceError
from attnlens_export.graph.names import input_names
from attnlens_export.json_files import write_json
from attnlens_model import EncoderConfig
from attnlens_model.checkpoint.tensor_files import check_not_lfs_pointer
from attnlens_publisher.errors import FailedError, MissingError, RefusedError
from attnlens_publisher.process import TOKENIZER_IMPORTS, call
from attnlens_publisher.tokenizer import GENERIC_CLASS, Choice, add_lowercase, mark_padding

_MAX_BYTES = 8 * 10**9
_TIMEOUT_S = 600
_FILE = "tokenizer.json"
_MAX_NAMES = 5
# Names of tokenizer files in transformers. The classes of a checkpoint decide which ones are read.
_VOCABULARIES = (_FILE, "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


def write_tokenizer(
    directory: Path,
    source: Path | None,
    tokenizer: Path | Choice | None,
    config: EncoderConfig,
    max_tokens: int,
    *,
    lowercase: bool = False,
) -> str:
    """Write the tokenizer, with truncation at `max_tokens` and no padding, and its settings files.

    Without a tokenizer, nothing is written.

    Args:
        directory: Bundle directory.
        source: Checkpoint directory, if any.
        tokenizer: A `tokenizer.json` to use instead of the checkpoint's, or the choice if the checkpoint's
            `tokenizer.json` and transformers give different ids.
        config: Encoder configuration.
        max_tokens: Maximum input length.
        lowercase: Whether texts of the checkpoint are lowercased first, a setting of sentence-transformers.

    Returns:
        A description of the tokenizer and its origin. Empty without a tokenizer.

    Raises:
        SourceError: The tokenizer is invalid, cannot be expressed in `tokenizer.json`, or has ids outside the
            encoder's vocabulary, or the files of the checkpoint give different ids and there is no choice.
        CheckpointError: A file is a Git LFS pointer.
    """
    if tokenizer is not None and tokenizer not in get_args(Choice):
        _write_file(directory, Path(tokenizer), config, max_tokens, lowercase=lowercase)
        description = str(tokenizer)
    elif source is not None and (found := _vocabularies(source)):
        for path in found:
            check_not_lfs_pointer(path)
        directory.mkdir(parents=True, exist_ok=True)
        description = _read(
            source,
            output=str(directory),
            choice=tokenizer,
            max_tokens=max_tokens,
            pad_token_id=config.embeddings.pad_token_id,
            lowercase=lowercase,
        )
    else:
        return ""
    return description + _check_ids(Tokenizer.from_file(str(directory / _FILE)), description, config)


def _vocabularies(source: Path) -> list[Path]:
    return sorted({path for name in _VOCABULARIES for path in source.glob(name) if path.is_file()})


def _read(source: Path, **arguments: Any) -> str:  # noqa: ANN401 - JSON values
    try:
        result: str = call(
            "attnlens_publisher.tokenizer:read",
            max_bytes=_MAX_BYTES,
            timeout_s=_TIMEOUT_S,
            imports=TOKENIZER_IMPORTS,
            source=str(source),
            **arguments,
        )
    except MissingError as error:
        raise SourceError(f'{error}: pip install "attnlens[export]"') from error
    except RefusedError as error:
        raise SourceError(str(error)) from error
    except FailedError as error:
        raise SourceError(
            f"transformers cannot read the tokenizer of the checkpoint ({error}): pass a tokenizer.json with "
            "--tokenizer FILE"
        ) from error
    return result


def _write_file(
    directory: Path, path: Path, config: EncoderConfig, max_tokens: int, *, lowercase: bool
) -> None:
    """Write a given `tokenizer.json`. The settings of the checkpoint do not apply to it."""
    if path.is_file():
        check_not_lfs_pointer(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise SourceError(f"{path} is not a tokenizer: {error}") from error
    side = (tokenizer.truncation or {}).get("direction", "right")
    if lowercase:
        add_lowercase(tokenizer)
    pad_token = mark_padding(tokenizer, config.embeddings.pad_token_id)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens, direction=side)
    write_json(directory / _FILE, json.loads(tokenizer.to_str()))
    settings = {
        "tokenizer_class": GENERIC_CLASS,
        "model_input_names": list(input_names(config)),
        "model_max_length": max_tokens,
        "truncation_side": side,
        "pad_token": pad_token,
    }
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "special_tokens_map.json", {"pad_token": pad_token})


def _check_ids(tokenizer: Tokenizer, source: str, config: EncoderConfig) -> str:
    """Check ids against the encoder's vocabulary. Return a note on added tokens that have no embedding."""
    limit = config.embeddings.vocab_size
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise SourceError(f"{source} has an empty vocabulary: specify another tokenizer with --tokenizer")
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    used = {*tokenizer.encode("a").ids, *tokenizer.encode("a", "a").ids}
    names = {number: token for token, number in vocabulary.items()}
    required = {number: token for number, token in names.items() if number in used or number not in added}
    if (largest := max(required, default=0)) >= limit:
        raise SourceError(
            f"{source} has the id {largest} ({required[largest]!r}), but the encoder only supports ids below "
            f"vocab_size={limit}: the tokenizer belongs to another model"
        )
    beyond = [repr(token) for number, token in sorted(added.items()) if number >= limit]
    if not beyond:
        return ""
    shown = ", ".join(beyond[:_MAX_NAMES]) + (", ..." if len(beyond) > _MAX_NAMES else "")
    return f"; texts with added tokens that have no embedding are rejected: {shown}"
