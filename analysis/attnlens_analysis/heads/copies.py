"""Attention to earlier occurrences in sequences of random tokens that are repeated once.

Implements the test for induction heads of Olsson et al. 2022, "In-context Learning and Induction Heads"
(https://arxiv.org/abs/2209.11895). Shapes: N heads, S tokens of each half.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.maps import MapSource, Progress
from attnlens_server.text import TokenSource

NUM_SEQUENCES = 40
HALF_LENGTH = 30
SEED = 0
_MIN_HALF_LENGTH = 4
_BATCH = 8


@dataclass(frozen=True, slots=True)
class CopyTest:
    """Mean weights in the rows of the second half. Arrays have the shape (N,).

    Attributes:
        num_sequences: Number of random sequences.
        half_length: Number of tokens S of each half.
        earlier_copy: Weight on the same token in the first half.
        induction: Weight on the token after the same token in the first half, excluding the last row.
        chance: Weight of uniform attention.
    """

    num_sequences: int
    half_length: int
    earlier_copy: npt.NDArray[np.float64]
    induction: npt.NDArray[np.float64]
    chance: float


def measure_copies(source: MapSource, progress: Progress) -> CopyTest | None:
    """Run the test on `NUM_SEQUENCES` random sequences. Return None if the model supports too few tokens."""
    before, after = _special_tokens(source)
    model = source.bundle.model
    half = min(HALF_LENGTH, (model.max_tokens - len(before) - len(after)) // 2)
    if half < _MIN_HALF_LENGTH:
        return None
    generator = np.random.default_rng(SEED)
    ids = np.array([token_id for token_id in range(model.vocab_size) if _is_word(source.spelling(token_id))])
    halves = [generator.choice(ids, half, replace=half > len(ids)) for _ in range(NUM_SEQUENCES)]
    sequences = [np.concatenate([before, tokens, tokens, after]) for tokens in halves]
    rows = len(before) + half + np.arange(half)
    copies, induction = np.zeros(len(source.heads)), np.zeros(len(source.heads))
    for start in range(0, NUM_SEQUENCES, _BATCH):
        for weights in source.of_ids(sequences[start : start + _BATCH]):
            copies += weights[:, rows, rows - half].mean(axis=-1)
            induction += weights[:, rows[:-1], rows[:-1] - half + 1].mean(axis=-1)
        progress("repeated random tokens", min(start + _BATCH, NUM_SEQUENCES), NUM_SEQUENCES)
    return CopyTest(
        NUM_SEQUENCES, half, copies / NUM_SEQUENCES, induction / NUM_SEQUENCES, 1 / len(sequences[0])
    )


def _is_word(spelling: str) -> bool:
    """Return whether a token is not special or unused, such as [MASK], <pad> and [unused1]."""
    return bool(spelling) and not (spelling[0] in "[<" and spelling[-1] in "]>")


def _special_tokens(source: MapSource) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the special tokens that the tokenizer adds before and after a text."""
    [encoded] = source.encode(["a"])
    if encoded is None:
        raise AssertionError("TextEncoder guarantees a limit of at least one token")
    content = [row for row, kind in enumerate(encoded.tokens.sources) if kind is not TokenSource.SPECIAL]
    first, last = (content[0], content[-1]) if content else (len(encoded.input_ids), len(encoded.input_ids))
    return encoded.input_ids[:first], encoded.input_ids[last + 1 :]
