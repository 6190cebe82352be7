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
CUT_TOKENS = 256  # the limit of MiniLM's publisher
SHORT_TOKENS = 128  # attention rows: a map grows with the square of a text's length
LONG_TOKENS = (257, 512)  # of `long`; 512 is what the encoders take
CALIBRATION_TEXTS = 200


@dataclass(frozen=True)
class Workload:
    """Texts under a name.

    Attributes:
        name: `passages`, `sentences`, `mixed`, `short` or `long`.
        texts: in the order in which they are sent.
        lengths: tokens of each, special tokens included.
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
    """Passages of prose, sentences of the STS benchmark, and the tokenizer that counts.

    Texts are cut here and not by the programs, so that all get the same, whatever limit they know.

    Attributes:
        calibration: texts for those who quantize. None of them is measured.
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
        held_out = [draw(passages, half, seed=SEED + 1), draw(sentences, half, seed=SEED + 1)]
        self.calibration = [self.cut(text, CUT_TOKENS) for texts in held_out for text in texts]
        self._passages = [text for text in passages if text not in held_out[0]]
        self._sentences = [text for text in sentences if text not in held_out[1]]

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
        fitting = [text for text in draw(both, len(both)) if len(self._encode(text)) <= SHORT_TOKENS]
        return self._workload("short", fitting[:size])

    def long(self, size: int) -> Workload:
        """Join passages until they have LONG_TOKENS, each number of tokens as likely as any."""
        chance = random.Random(SEED)
        texts = []
        for _ in range(size):
            num_tokens, text = chance.randint(*LONG_TOKENS), ""
            while len(self._encode(text)) < num_tokens:
                text += f" {chance.choice(self._passages)}" if text else chance.choice(self._passages)
            texts.append(self.cut(text, num_tokens))
        return self._workload("long", texts, LONG_TOKENS[1])

    def cut(self, text: str, max_tokens: int) -> str:
        """Return the beginning of a text that has at most so many tokens, special tokens included."""
        encoding = self._encode(text)
        if len(encoding) <= max_tokens:
            return text
        num_special = sum(encoding.special_tokens_mask)
        ends = [
            end
            for (_, end), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
            if not special
        ]
        # A word that is cut in two may have more tokens than its part had: then one token less is tried.
        for last in range(max_tokens - num_special - 1, -1, -1):
            if len(self._encode(text[: ends[last]])) <= max_tokens:
                return text[: ends[last]]
        return ""

    def _encode(self, text: str) -> tokenizers.Encoding:
        return self._tokenizer.encode(text)

    def _workload(self, name: str, texts: list[str], max_tokens: int = CUT_TOKENS) -> Workload:
        texts = [self.cut(text, max_tokens) for text in texts]
        return Workload(name, texts, [len(encoding) for encoding in self._tokenizer.encode_batch(texts)])


def draw(texts: list[str], size: int, seed: int = SEED) -> list[str]:
    """Draw `size` texts without repetition, or all if there are fewer."""
    return random.Random(seed).sample(texts, min(size, len(texts)))
