"""Benchmark texts, read from a file or drawn at random."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from attnlens_server.bundle import Bundle, Model
from attnlens_server.errors import StartupError
from attnlens_server.text import TextEncoder

SEED = 1
NUM_RANDOM_TEXTS = 2000
MEDIAN_TOKENS = 32
SIGMA = 1.0  # standard deviation of log lengths: 10 % of texts exceed 115 tokens, 1 % exceed 327
MIN_TOKENS = 3
MAX_TEXTS = 20_000  # maximum read from a file; more would not change the result
SHIPPED_TEXTS = "parity/int8_texts.txt"  # included in bundles with int8: texts of several kinds, one per line
MAX_SAMPLE_TOKENS = 16_000  # takes a few seconds with a model of BERT-base size


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokenized texts.

    Attributes:
        description: Source of the texts, shown in the report.
        input_ids: (T,) int64 each, sent repeatedly in this order.
        num_truncated: Number of texts that were truncated to the model's limit.
        are_real: False for random token ids.
    """

    description: str
    input_ids: tuple[npt.NDArray[np.int64], ...]
    num_truncated: int = 0
    are_real: bool = True

    @property
    def mean_tokens(self) -> float:
        """Mean length of a text."""
        return float(np.mean([len(text) for text in self.input_ids]))

    def quantile_tokens(self, fraction: float) -> int:
        """Return the length that `fraction` of the texts do not exceed."""
        lengths = [len(text) for text in self.input_ids]
        return int(np.quantile(lengths, fraction, method="inverted_cdf"))

    def sample(self, max_tokens: int = MAX_SAMPLE_TOKENS) -> "Workload":
        """Return evenly spaced texts with about `max_tokens` tokens in total."""
        size = max(1, min(len(self.input_ids), round(max_tokens / self.mean_tokens)))
        if size == len(self.input_ids):
            return self
        indices = np.linspace(0, len(self.input_ids) - 1, size).round().astype(int)
        description = f"{size:,} of {self.description}"
        return replace(self, description=description, input_ids=tuple(self.input_ids[n] for n in indices))

    def nearest(self, num_tokens: int) -> npt.NDArray[np.int64]:
        """Return the first text whose length is nearest to `num_tokens`."""
        return min(self.input_ids, key=lambda text: abs(len(text) - num_tokens))


def draw_workload(model: Model) -> Workload:
    """Return random token ids with log-normal lengths, which resemble the lengths of real texts."""
    generator = np.random.default_rng(SEED)
    drawn = np.rint(generator.lognormal(np.log(MEDIAN_TOKENS), SIGMA, NUM_RANDOM_TEXTS))
    lengths = np.clip(drawn, min(MIN_TOKENS, model.max_tokens), model.max_tokens).astype(int)
    # Some families count positions over non-padding tokens only.
    ids = np.delete(np.arange(model.vocab_size), model.pad_token_id)
    return Workload(
        f"{NUM_RANDOM_TEXTS:,} random texts (lengths log-normal, median {MEDIAN_TOKENS}, sigma {SIGMA:g}, "
        f"cut at {model.max_tokens})",
        tuple(generator.choice(ids, length) for length in lengths),
        are_real=False,
    )


def read_workload(bundle: Bundle, texts: Iterable[str], name: str) -> Workload:
    """Tokenize up to MAX_TEXTS texts of a file.

    Args:
        bundle: Bundle with the tokenizer.
        texts: Texts of the file.
        name: Name of the file in the report and in error messages.

    Raises:
        StartupError: The bundle lacks a tokenizer, or all texts are empty.
    """
    if bundle.tokenizer_path is None:
        raise StartupError(
            f"{bundle.directory} has no tokenizer.json, so the texts of {name} cannot be tokenized: "
            "omit --texts to measure with random token ids"
        )
    encoder = TextEncoder(bundle.tokenizer_path, bundle.model.max_tokens, bundle.model.chat_template)
    encoded = encoder.encode([(text,) for text in islice(texts, MAX_TEXTS)])
    kept = tuple(text.input_ids for text in encoded if text.num_tokens)
    if not kept:
        raise StartupError(f"{name} contains only empty texts: use a file with one text per line")
    num_truncated = sum(text.num_tokens < text.num_tokens_total for text in encoded)
    first = "the first " if len(encoded) == MAX_TEXTS else ""
    return Workload(f"{first}{len(kept):,} text{'s' * (len(kept) > 1)} of {name}", kept, num_truncated)


def read_shipped_workload(bundle: Bundle) -> Workload | None:
    """Tokenize the texts used to verify int8, or return None if the bundle lacks them."""
    if SHIPPED_TEXTS not in bundle.states or bundle.tokenizer_path is None:
        return None
    content = (bundle.directory / SHIPPED_TEXTS).read_text(encoding="utf-8")
    return read_workload(bundle, content.removesuffix("\n").split("\n"), f"the bundle's {SHIPPED_TEXTS}")
