"""Support of text pairs by a tokenizer and an encoder."""

from pathlib import Path

from tokenizers import Tokenizer

from attnlens_export.graph.names import input_names
from attnlens_model import EncoderConfig


def takes_pairs(directory: Path, config: EncoderConfig) -> bool:
    """Return whether a bundle can encode text pairs.

    The tokenizer must insert a special token between the texts and must not use token types that the encoder
    lacks. Tokenizers without a pair template, or that only concatenate the texts, are not sufficient.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return False
    encoding = Tokenizer.from_file(str(path)).encode("first", "second")
    texts = encoding.sequence_ids  # 0 or 1; None for special tokens
    if 0 not in texts or 1 not in texts:
        return False
    last_of_first = len(texts) - 1 - texts[::-1].index(0)
    has_separator = texts.index(1) > last_of_first + 1
    num_types = config.embeddings.type_vocab_size if "token_type_ids" in input_names(config) else None
    return has_separator and (num_types is None or max(encoding.type_ids) < num_types)
