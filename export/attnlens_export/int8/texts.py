"""Texts of several kinds, in three disjoint sets: to calibrate, to select products and to judge the result.

B batch, T tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from attnlens.bundle import BundleError
from attnlens_export.errors import SourceError
from attnlens_export.graph.names import input_names
from attnlens_export.parity.grid import Inputs
from attnlens_model import EncoderConfig

# What is read of a text. Attention takes time that grows with the square, and says little of the products.
MAX_TEXT_TOKENS = 256
MAX_BATCH_TOKENS = 1024
MIN_TEXTS = 20
# Those of this package, in data/.
KINDS = ("sentences", "prose", "very_short", "code_and_numbers", "other_scripts")
GIVEN = "given"
EMPTY = ""


@dataclass(frozen=True)
class Batch:
    """Texts of similar length, padded right.

    Attributes:
        inputs: (B, T).
        places: the number of each row's text, (B,).
    """

    inputs: Inputs
    places: tuple[int, ...]


class TextSets(NamedTuple):
    """Disjoint sets of texts, apart from the empty text.

    Attributes:
        calibration: Texts that scales and rounding are computed from.
        selection: Texts that decide which products are quantized, and how.
        judgement: Texts that the finished graph is measured on.
    """

    calibration: list[str]
    selection: list[str]
    judgement: list[str]


def read_kinds(path: Path | None) -> dict[str, list[str]]:
    """Return the texts of this package by kind, and those of a file as a kind of their own.

    Args:
        path: one text per line, empty lines left out; None: no such file.

    Raises:
        SourceError: the file has too few texts, or is not UTF-8.
    """
    data = files("attnlens_export.int8") / "data"
    kinds = {kind: _lines((data / f"{kind}.txt").read_text(encoding="utf-8")) for kind in KINDS}
    return kinds if path is None else {**kinds, GIVEN: _read_given(path)}


def _lines(content: str) -> list[str]:
    """Return one text per line; an empty line is an empty text."""
    return content.removesuffix("\n").split("\n")


def _read_given(path: Path) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} can't be read as text: {error}") from error
    texts = [line.strip() for line in content.split("\n") if line.strip()]
    if len(texts) < MIN_TEXTS:
        raise SourceError(f"{path} has {len(texts)} texts, at least {MIN_TEXTS} are needed, one per line")
    return texts


def split_texts(texts: Sequence[str]) -> TextSets:
    """Split texts: every second one calibrates, every fourth one selects, every fourth one judges.

    The empty text, which every server receives sooner or later, is in every set if it is among the texts.
    """
    sets = [texts[::2], texts[1::4], texts[3::4]]
    if EMPTY in texts:
        sets = [members if EMPTY in members else [EMPTY, *members] for members in sets]
    return TextSets(*map(list, sets))


def write_texts(path: Path, kinds: Mapping[str, Sequence[str]]) -> None:
    """Write one text per line, kind after kind."""
    lines = [text for texts in kinds.values() for text in texts]
    path.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")


def read_written(path: Path, sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Read what `write_texts` wrote.

    Args:
        path: the file.
        sizes: the number of texts of each kind in their order; none, as in bundles of attnlens 0.1.0: all are
            of one kind.

    Raises:
        BundleError: the file has another number of texts.
    """
    texts = _lines(path.read_text(encoding="utf-8"))
    sizes = sizes or {"texts": len(texts)}
    if sum(sizes.values()) != len(texts):
        raise BundleError(
            f"{path} has {len(texts)} texts, the manifest names {sum(sizes.values())}: export the bundle "
            "again"
        )
    lines = iter(texts)
    return {kind: list(islice(lines, size)) for kind, size in sizes.items()}


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
    input_ids = np.full(shape, config.embeddings.pad_token_id, np.int64)
    mask = np.zeros(shape, np.int64)
    for row, place in enumerate(places):
        input_ids[row, : len(ids[place])] = ids[place]
        mask[row, : len(ids[place])] = 1
    types = np.zeros(shape, np.int64) if "token_type_ids" in input_names(config) else None
    return Batch(Inputs(input_ids, mask, types), tuple(places))
