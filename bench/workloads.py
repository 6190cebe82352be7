"""Benchmark texts, sampled with a fixed seed and shared by all contestants."""

import csv
import json
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

DATA = Path(__file__).parents[1] / "tests" / "data"
SEED = 20_150_801
CUT_TOKENS = 256  # published limit of MiniLM
SHORT_TOKENS = 128  # for attention, whose size is quadratic in the length
LONG_TOKENS = (257, 512)  # range of `long`; the encoders accept 512
CALIBRATION_TEXTS = 200


@dataclass(frozen=True)
class Workload:
    """A named list of texts.

    Attributes:
        name: One of `passages`, `sentences`, `mixed`, `short` and `long`.
        texts: Texts in sending order.
        lengths: Number of tokens of each text, including special tokens.
    """

    name: str
    texts: list[str]
    lengths: list[int]

    @cached_property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return sum(self.lengths)

    def describe(self) -> dict[str, int]:
        """Return the number of texts and statistics of their lengths."""
        ordered = sorted(self.lengths)
        return {
            "texts": len(ordered),
            "tokens": self.num_tokens,
            "median_tokens": ordered[len(ordered) // 2],
            "p90_tokens": ordered[len(ordered) * 9 // 10],
            "max_tokens": ordered[-1],
        }


class Corpus:
    """Samples workloads from prose passages and STS benchmark sentences.

    Texts are truncated here so that all contestants process identical input.

    Attributes:
        calibration: Texts for calibrating quantization. Excluded from all workloads.
    """

    def __init__(self, bundle: Path) -> None:
        lines = (DATA / "passages.jsonl").read_text(encoding="utf-8").splitlines()
        passages: list[str] = [json.loads(line)["text"] for line in lines]
        with (DATA / "stsb-en-dev.csv").open(encoding="utf-8", newline="") as file:
            sentences = sorted({sentence for row in csv.reader(file) for sentence in row[:2]})
        self._tokenizer = tokenizers.Tokenizer.from_file(str(bundle / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        half = CALIBRATION_TEXTS // 2
        held_out = [sample(passages, half, seed=SEED + 1), sample(sentences, half, seed=SEED + 1)]
        self.calibration = [self.cut(text, CUT_TOKENS) for texts in held_out for text in texts]
        self._passages = [text for text in passages if text not in held_out[0]]
        self._sentences = [text for text in sentences if text not in held_out[1]]

    def passages(self, size: int) -> Workload:
        """Sample passages, with a median of 49 tokens and a truncated tail."""
        return self._workload("passages", sample(self._passages, size))

    def sentences(self, size: int) -> Workload:
        """Sample sentences, mostly of 10 to 20 tokens."""
        return self._workload("sentences", sample(self._sentences, size))

    def mixed(self, size: int) -> Workload:
        """Sample a heavy-tailed mix of sentences, passages and texts of four passages."""
        chance = random.Random(SEED)
        texts = []
        for kind in chance.choices(["sentence", "passage", "long"], [80, 15, 5], k=size):
            if kind == "long":
                texts.append(" ".join(chance.sample(self._passages, 4)))
            else:
                texts.append(chance.choice(self._sentences if kind == "sentence" else self._passages))
        return self._workload("mixed", texts)

    def short(self, size: int) -> Workload:
        """Sample sentences and passages in equal parts, with at most SHORT_TOKENS tokens."""
        both = sample(self._passages, len(self._passages)) + sample(self._sentences, len(self._passages))
        fitting = [text for text in sample(both, len(both)) if len(self._encode(text)) <= SHORT_TOKENS]
        return self._workload("short", fitting[:size])

    def long(self, size: int) -> Workload:
        """Concatenate passages to lengths distributed uniformly over LONG_TOKENS."""
        chance = random.Random(SEED)
        texts = []
        for _ in range(size):
            num_tokens, text = chance.randint(*LONG_TOKENS), ""
            while len(self._encode(text)) < num_tokens:
                text += f" {chance.choice(self._passages)}" if text else chance.choice(self._passages)
            texts.append(self.cut(text, num_tokens))
        return self._workload("long", texts, LONG_TOKENS[1])

    def cut(self, text: str, max_tokens: int) -> str:
        """Truncate a text to at most `max_tokens` tokens, including special tokens."""
        encoding = self._encode(text)
        if len(encoding) <= max_tokens:
            return text
        num_special = sum(encoding.special_tokens_mask)
        ends = [
            end
            for (_, end), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
            if not special
        ]
        # Truncation inside a word may change its tokenization and add tokens. Retry with one token less.
        for last in range(max_tokens - num_special - 1, -1, -1):
            if len(self._encode(text[: ends[last]])) <= max_tokens:
                return text[: ends[last]]
        return ""

    def _encode(self, text: str) -> tokenizers.Encoding:
        return self._tokenizer.encode(text)

    def _workload(self, name: str, texts: list[str], max_tokens: int = CUT_TOKENS) -> Workload:
        texts = [self.cut(text, max_tokens) for text in texts]
        return Workload(name, texts, [len(encoding) for encoding in self._tokenizer.encode_batch(texts)])


def sample(texts: list[str], size: int, seed: int = SEED) -> list[str]:
    """Sample `size` texts without replacement, or all if there are fewer."""
    return random.Random(seed).sample(texts, min(size, len(texts)))
