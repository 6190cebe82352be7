"""Support of text pairs by a tokenizer and an encoder."""

from pathlib import Path

from tokenizers import Tokenizer

from attnlens_export.graph.names import input_names
from attnlens_export.published.chat_template import read_template
from attnlens_model import EncoderConfig


def takes_pairs(directory: Path, config: EncoderConfig) -> bool:
    """Return whether a bundle can encode text pairs.

    The tokenizer must keep both texts and must not use token types that the encoder lacks. Some tokenizers
    add no token between the texts, which transformers and CrossEncoder accept, too. A chat template has a
    single text.
    """
    path = directory / "tokenizer.json"
    if not path.is_file() or read_template(directory) is not None:
        return False
    encoding = Tokenizer.from_file(str(path)).encode("first", "second")
    texts = encoding.sequence_ids  # 0 or 1; None for special tokens
    num_types = config.embeddings.type_vocab_size if "token_type_ids" in input_names(config) else None
    return {0, 1} <= {*texts} and (num_types is None or max(encoding.type_ids) < num_types)
