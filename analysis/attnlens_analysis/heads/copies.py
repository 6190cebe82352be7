"""What heads do where the same random tokens come twice: look at the earlier copy, or at the token after it.

The test for induction heads of Olsson et al. 2022, "In-context Learning and Induction Heads"
(https://arxiv.org/abs/2209.11895): nothing but the repetition tells where to look. Letters: N heads, n tokens
of a half.
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
    """Mean weights in the rows of the second half, a number for each of N heads.

    Attributes:
        num_sequences: how many sequences of random tokens.
        half_length: n.
        earlier_copy: weight on the same token in the first half.
        induction: weight on the token after that, without the row of the last token.
        chance: what attention to all tokens alike gives.
    """

    num_sequences: int
    half_length: int
    earlier_copy: npt.NDArray[np.float64]
    induction: npt.NDArray[np.float64]
    chance: float


def measure_copies(source: MapSource, progress: Progress) -> CopyTest | None:
    """Measure on `NUM_SEQUENCES` sequences, drawn with `SEED`; None: the model takes too few tokens."""
    before, after = _special_tokens(source)
    model = source.bundle.model
    half = min(HALF_LENGTH, (model.max_tokens - len(before) - len(after)) // 2)
    if half < _MIN_HALF_LENGTH:
        return None
    generator = np.random.default_rng(SEED)
    ids = np.array([number for number in range(model.vocab_size) if _is_word(source.spelling(number))])
    halves = [generator.choice(ids, half, replace=half > len(ids)) for _ in range(NUM_SEQUENCES)]
    sequences = [np.concatenate([before, drawn, drawn, after]) for drawn in halves]
    rows = len(before) + half + np.arange(half)
    copies, behind = np.zeros(len(source.heads)), np.zeros(len(source.heads))
    for start in range(0, NUM_SEQUENCES, _BATCH):
        for weights in source.of_ids(sequences[start : start + _BATCH]):
            copies += weights[:, rows, rows - half].mean(axis=-1)
            behind += weights[:, rows[:-1], rows[:-1] - half + 1].mean(axis=-1)
        progress("repeated random tokens", min(start + _BATCH, NUM_SEQUENCES), NUM_SEQUENCES)
    return CopyTest(
        NUM_SEQUENCES, half, copies / NUM_SEQUENCES, behind / NUM_SEQUENCES, 1 / len(sequences[0])
    )


def _is_word(spelling: str) -> bool:
    """Tell tokens of words from special and unused ones, such as [MASK], <pad> and [unused1]."""
    return bool(spelling) and not (spelling[0] in "[<" and spelling[-1] in "]>")


def _special_tokens(source: MapSource) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the special tokens that the tokenizer puts before and behind a text."""
    [encoded] = source.encode(["a"])
    if encoded is None:
        raise AssertionError("TextEncoder takes no limit without room for one token")
    content = [row for row, kind in enumerate(encoded.tokens.sources) if kind is not TokenSource.SPECIAL]
    first, last = (content[0], content[-1]) if content else (len(encoded.input_ids), len(encoded.input_ids))
    return encoded.input_ids[:first], encoded.input_ids[last + 1 :]
