"""The texts to measure with: the user's own, or ids drawn at random."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from attnlens_server.bundle import Bundle, Model
from attnlens_server.errors import StartupError
from attnlens_server.text import TextEncoder

SEED = 1
NUM_DRAWN = 2000
MEDIAN_TOKENS = 32
SIGMA = 1.0  # of the logarithm: a text in ten has more than 115 tokens, one in a hundred more than 327
MIN_TOKENS = 3
MAX_TEXTS = 20_000  # of a file; more would say nothing more
SHIPPED_TEXTS = "parity/int8_texts.txt"  # of a bundle with int8: several kinds of text, one per line
MAX_SAMPLE_TOKENS = 16_000  # some seconds for a model of the size of BERT-base


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts as token ids.

    Attributes:
        description: where they come from.
        input_ids: (T,) int64 each; in the order in which they are sent, over and over.
        num_cut: how many were longer than the model takes, and cut.
        are_real: whether these are texts that somebody wrote, and not ids drawn at random.
    """

    description: str
    input_ids: tuple[npt.NDArray[np.int64], ...]
    num_cut: int = 0
    are_real: bool = True

    @property
    def mean_tokens(self) -> float:
        """Tokens of a text."""
        return float(np.mean([len(text) for text in self.input_ids]))

    def quantile_tokens(self, share: float) -> int:
        """Return a length that `share` of the texts don't exceed."""
        lengths = [len(text) for text in self.input_ids]
        return int(np.quantile(lengths, share, method="inverted_cdf"))

    def sample(self, max_tokens: int = MAX_SAMPLE_TOKENS) -> "Workload":
        """Return as many of the texts, evenly spaced, as have about `max_tokens` together."""
        count = max(1, min(len(self.input_ids), round(max_tokens / self.mean_tokens)))
        if count == len(self.input_ids):
            return self
        places = np.linspace(0, len(self.input_ids) - 1, count).round().astype(int)
        description = f"{count:,} of {self.description}"
        return replace(self, description=description, input_ids=tuple(self.input_ids[n] for n in places))

    def nearest(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return the first text of those whose length is nearest to `num_tokens`."""
        return min(self.input_ids, key=lambda text: abs(len(text) - num_tokens))


def draw_workload(model: Model) -> Workload:
    """Draw ids at random, and lengths as those of texts often are: many short ones, a few long ones."""
    chance = np.random.default_rng(SEED)
    drawn = np.rint(chance.lognormal(np.log(MEDIAN_TOKENS), SIGMA, NUM_DRAWN))
    lengths = np.clip(drawn, min(MIN_TOKENS, model.max_tokens), model.max_tokens).astype(int)
    # In some families positions are counted over the tokens that aren't padding: none of these is.
    ids = np.delete(np.arange(model.vocab_size), model.pad_token_id)
    return Workload(
        f"{NUM_DRAWN:,} random texts (lengths log-normal, median {MEDIAN_TOKENS}, sigma {SIGMA:g}, "
        f"cut at {model.max_tokens})",
        tuple(chance.choice(ids, length) for length in lengths),
        are_real=False,
    )


def read_workload(bundle: Bundle, texts: Iterable[str], name: str) -> Workload:
    """Tokenize the texts of a file, at most MAX_TEXTS; `name` is what to call it.

    Raises:
        StartupError: there is no tokenizer, or no text.
    """
    if bundle.tokenizer_path is None:
        raise StartupError(
            f"{bundle.directory} has no tokenizer.json, and {name} has texts: leave --texts out to measure "
            "with random token ids"
        )
    encoder = TextEncoder(bundle.tokenizer_path, bundle.model.max_tokens)
    encoded = encoder.encode([(text,) for text in islice(texts, MAX_TEXTS)])
    kept = tuple(text.input_ids for text in encoded if text.num_tokens)
    if not kept:
        raise StartupError(f"{name} has no text with a token in it: give a file with one text a line")
    num_cut = sum(text.num_tokens < text.num_tokens_total for text in encoded)
    first = "the first " if len(encoded) == MAX_TEXTS else ""
    return Workload(f"{first}{len(kept):,} text{'s' * (len(kept) > 1)} of {name}", kept, num_cut)


def read_shipped_workload(bundle: Bundle) -> Workload | None:
    """Tokenize the texts that int8 was verified with; None where the bundle has none, or no tokenizer."""
    if SHIPPED_TEXTS not in bundle.states or bundle.tokenizer_path is None:
        return None
    content = (bundle.directory / SHIPPED_TEXTS).read_text(encoding="utf-8")
    return read_workload(bundle, content.removesuffix("\n").split("\n"), f"the bundle's {SHIPPED_TEXTS}")
