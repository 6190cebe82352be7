"""The texts that methods are measured on: sentences of this package, or a file's lines. T tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from attnlens.bundle import BundleError
from attnlens_export.errors import SourceError

# A text of fewer tokens, special ones not counted, ranks too little.
MIN_TOKENS = 5
MAX_TOKENS = 128
MIN_TEXTS = 10


@dataclass(frozen=True)
class TokenizedText:
    """One text.

    Attributes:
        ids: (T,).
        ranked: the places of the tokens that are no special tokens, in order.
        lengths: how many characters each token stands for, (T,).
    """

    ids: npt.NDArray[np.int64]
    ranked: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def read_texts(path: Path | None) -> list[str]:
    """Return one text per line of a file, empty lines left out, or the sentences of this package.

    Raises:
        SourceError: the file can't be read as UTF-8, or has too few texts.
    """
    if path is None:
        content = (files("attnlens_export.faithfulness") / "data" / "sentences.txt").read_text("utf-8")
        return content.splitlines()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} can't be read as text: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def tokenize(directory: Path, texts: Sequence[str], max_tokens: int) -> list[TokenizedText]:
    """Tokenize texts as the bundle does, without a prompt; those of too few tokens are left out.

    Raises:
        BundleError: the bundle has no tokenizer.
        SourceError: too few texts are left.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise BundleError(f"{path} is absent: faithfulness is measured on texts, which need a tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(min(max_tokens, MAX_TOKENS))
    found = list(_described(tokenizer, texts))
    if len(found) < MIN_TEXTS:
        raise SourceError(
            f"{len(found)} texts have {MIN_TOKENS} tokens or more, at least {MIN_TEXTS} are needed: "
            "give more lines with --texts"
        )
    return found


def _described(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[TokenizedText]:
    for encoding in tokenizer.encode_batch(list(texts)):
        ranked = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
        if len(ranked) >= MIN_TOKENS:
            lengths = np.array([end - start for start, end in encoding.offsets], dtype=np.int64)
            yield TokenizedText(np.array(encoding.ids, dtype=np.int64), ranked, lengths)
