"""English test sentences for coreference and related words, which are included in the package.

`data/LICENSE.md` describes how they were written. Both files are tab-separated with a heading. Words and
punctuation marks are separated by single spaces, and word indices are counted from 0.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class PronounItem:
    """A sentence with a pronoun.

    Attributes:
        group: Number of the frame or sentence pair from which the sentence was made, counted from 1.
        kind: What identifies the antecedent: `gender`, `number` or `meaning`.
        words: Words of the sentence.
        pronoun: Index of the pronoun.
        antecedent: Index of the noun or name that the pronoun refers to.
        distractors: Indices of the other nouns or names of the same kind.
    """

    group: int
    kind: str
    words: tuple[str, ...]
    pronoun: int
    antecedent: int
    distractors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WordPairItem:
    """A text that contains a word twice, and two words that can replace the first occurrence.

    Attributes:
        part_of_speech: `noun`, `verb` or `adjective`.
        words: Words of the text.
        first: Index of the first occurrence.
        second: Index of the second occurrence.
        synonym: Synonym of the word.
        unrelated: Unrelated word of the same part of speech. It is the synonym in another item.
    """

    part_of_speech: str
    words: tuple[str, ...]
    first: int
    second: int
    synonym: str
    unrelated: str

    @property
    def variants(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The words of the text with the same word, its synonym and the unrelated word at `first`."""
        before, after = self.words[: self.first], self.words[self.first + 1 :]
        return self.words, (*before, self.synonym, *after), (*before, self.unrelated, *after)


def pronoun_items() -> tuple[PronounItem, ...]:
    """Return the sentences with pronouns, in file order."""
    return tuple(
        PronounItem(
            int(row["group"]),
            row["kind"],
            tuple(row["text"].split(" ")),
            int(row["pronoun"]),
            int(row["antecedent"]),
            tuple(map(int, row["distractors"].split(","))),
        )
        for row in _rows("coreference.tsv")
    )


def word_pair_items() -> tuple[WordPairItem, ...]:
    """Return the texts with repeated words, in file order."""
    return tuple(
        WordPairItem(
            row["part_of_speech"],
            tuple(row["text"].split(" ")),
            int(row["first"]),
            int(row["second"]),
            row["synonym"],
            row["unrelated"],
        )
        for row in _rows("related_words.tsv")
    )


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (_DATA / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
