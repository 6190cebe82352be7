"""The texts that all contestants get, drawn with a fixed seed."""

import csv
import json
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

DATA = Path(__file__).parents[1] / "tests" / "data"
SEED = 20_150_801
SHORT_TOKENS = 128  # attention rows: a map grows with the square of a text's length


@dataclass(frozen=True)
class Workload:
    """Texts under a name.

    Attributes:
        name: `passages`, `sentences`, `mixed` or `short`.
        texts: in the order in which they are sent.
        lengths: tokens of each, special tokens included, cut at the bundle's limit.
    """

    name: str
    texts: list[str]
    lengths: list[int]

    @cached_property
    def num_tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(self.lengths)

    def describe(self) -> dict[str, int]:
        """Return how many texts there are and how long they are."""
        ordered = sorted(self.lengths)
        return {
            "texts": len(ordered),
            "tokens": self.num_tokens,
            "median_tokens": ordered[len(ordered) // 2],
            "p90_tokens": ordered[len(ordered) * 9 // 10],
            "max_tokens": ordered[-1],
        }


class Corpus:
    """Passages of prose, sentences of the STS benchmark, and the tokenizer that counts."""

    def __init__(self, bundle: Path, max_tokens: int) -> None:
        lines = (DATA / "passages.jsonl").read_text(encoding="utf-8").splitlines()
        self._passages: list[str] = [json.loads(line)["text"] for line in lines]
        with (DATA / "stsb-en-dev.csv").open(encoding="utf-8", newline="") as file:
            self._sentences = sorted({sentence for row in csv.reader(file) for sentence in row[:2]})
        self._tokenizer = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)

    def passages(self, size: int) -> Workload:
        """Draw passages: a median of 49 tokens, and a tail that is cut."""
        return self._workload("passages", draw(self._passages, size))

    def sentences(self, size: int) -> Workload:
        """Draw sentences: most have 10 to 20 tokens."""
        return self._workload("sentences", draw(self._sentences, size))

    def mixed(self, size: int) -> Workload:
        """Draw a heavy-tailed mix: many sentences, some passages, a few texts of four passages."""
        chance = random.Random(SEED)
        texts = []
        for kind in chance.choices(["sentence", "passage", "long"], [80, 15, 5], k=size):
            if kind == "long":
                texts.append(" ".join(chance.sample(self._passages, 4)))
            else:
                texts.append(chance.choice(self._sentences if kind == "sentence" else self._passages))
        return self._workload("mixed", texts)

    def short(self, size: int) -> Workload:
        """Draw sentences and passages in equal parts, none longer than SHORT_TOKENS."""
        both = draw(self._passages, len(self._passages)) + draw(self._sentences, len(self._passages))
        workload = self._workload("short", draw(both, len(both)))
        fitting = [index for index, length in enumerate(workload.lengths) if length <= SHORT_TOKENS][:size]
        return Workload(
            "short",
            [workload.texts[index] for index in fitting],
            [workload.lengths[index] for index in fitting],
        )

    def _workload(self, name: str, texts: list[str]) -> Workload:
        return Workload(name, texts, [len(encoding) for encoding in self._tokenizer.encode_batch(texts)])


def draw(texts: list[str], size: int) -> list[str]:
    """Draw `size` texts without repetition, or all if there are fewer."""
    return random.Random(SEED).sample(texts, min(size, len(texts)))
