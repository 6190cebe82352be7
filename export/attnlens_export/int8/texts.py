"""The texts that int8 is calibrated and verified with: every other one for each. B batch, T tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from attnlens_export.errors import SourceError
from attnlens_export.graph import input_names
from attnlens_export.grid import Inputs
from attnlens_model import EncoderConfig

# What is read of a text. Attention takes time that grows with the square, and says little of the products.
MAX_TEXT_TOKENS = 256
MAX_BATCH_TOKENS = 1024
MIN_TEXTS = 20


@dataclass(frozen=True)
class Batch:
    """Texts of similar length, padded right.

    Attributes:
        inputs: (B, T).
        places: the number of each row's text, (B,).
    """

    inputs: Inputs
    places: tuple[int, ...]


def read_texts(path: Path | None) -> list[str]:
    """Read one text per line, empty lines left out; None: the texts of this package.

    Raises:
        SourceError: there are too few, or the file is not UTF-8.
    """
    if path is None:
        content = (files("attnlens_export.int8") / "data" / "texts.txt").read_text(encoding="utf-8")
    else:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{path} can't be read as text: {error}") from error
    texts = [line.strip() for line in content.split("\n") if line.strip()]
    if len(texts) < MIN_TEXTS:
        raise SourceError(f"{path} has {len(texts)} texts, at least {MIN_TEXTS} are needed, one per line")
    return texts


def split_texts(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the texts to calibrate with, and the others, to verify with."""
    return list(texts[::2]), list(texts[1::2])


def make_batches(
    texts: Sequence[str], tokenizer_path: Path, config: EncoderConfig, max_tokens: int
) -> list[Batch]:
    """Tokenize texts, cut where they are too long, and put those of similar length together.

    Raises:
        SourceError: there is no tokenizer.
    """
    if not tokenizer_path.is_file():
        raise SourceError(
            "int8 is calibrated with texts, and there is no tokenizer: give one with --tokenizer, or export "
            "without --precision int8"
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(min(max_tokens, MAX_TEXT_TOKENS))
    ids = [each.ids for each in tokenizer.encode_batch(list(texts))]
    by_length = sorted((place for place in range(len(ids)) if ids[place]), key=lambda place: len(ids[place]))
    return [_batch(places, ids, config) for places in _in_turn(by_length, ids)]


def _in_turn(by_length: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    places: list[int] = []
    for place in by_length:
        if places and (len(places) + 1) * len(ids[place]) > MAX_BATCH_TOKENS:
            yield places
            places = []
        places.append(place)
    yield places


def _batch(places: Sequence[int], ids: Sequence[Sequence[int]], config: EncoderConfig) -> Batch:
    shape = (len(places), max(len(ids[place]) for place in places))
    input_ids = np.full(shape, config.pad_token_id, np.int64)
    mask = np.zeros(shape, np.int64)
    for row, place in enumerate(places):
        input_ids[row, : len(ids[place])] = ids[place]
        mask[row, : len(ids[place])] = 1
    types = np.zeros(shape, np.int64) if "token_type_ids" in input_names(config) else None
    return Batch(Inputs(input_ids, mask, types), tuple(places))
