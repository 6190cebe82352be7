"""Sentences to measure on: a treebank in CoNLL-U, the one that comes with the package, or plain lines.

CoNLL-U is described at https://universaldependencies.org/format.html. Of its ten columns four are read: FORM,
UPOS, HEAD and DEPREL. Multiword tokens (1-2) and empty nodes (1.1) are passed over, as they are no words of
the basic tree.
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_FORM, _UPOS, _HEAD, _DEPREL = (_COLUMNS.index(name) for name in ("FORM", "UPOS", "HEAD", "DEPREL"))
_SHIPPED = Path(__file__).parent / "data" / "ud_en_ewt_dev_500.tsv.gz"


class TreebankError(Exception):
    """A file is not what it is read as. The message has its name, the line and the column."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a sentence, as the treebank's annotators cut it.

    Attributes:
        form: as it is written.
        upos: its part of speech, such as NOUN.
        head: the number of the word that it depends on, from 0; None: it is the root.
        relation: to that word, with its subtype, such as `nsubj` or `aux:pass`.
    """

    form: str
    upos: str
    head: int | None
    relation: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text, and where it comes from a treebank its words.

    Attributes:
        text: in a treebank, the words with a space between each two.
        words: None: the text is a plain line.
    """

    text: str
    words: tuple[Word, ...] | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """What the heads are measured on.

    Attributes:
        name: for the report.
        licence: of the data; empty: unknown.
        sentences: in the order of the file.
    """

    name: str
    licence: str
    sentences: tuple[Sentence, ...]

    @property
    def is_treebank(self) -> bool:
        """Whether the sentences have words and relations."""
        return all(sentence.words is not None for sentence in self.sentences)


def shipped_treebank() -> Corpus:
    """Return the 500 sentences that come with the package; `data/LICENSE.md` says whose they are."""
    lines = gzip.decompress(_SHIPPED.read_bytes()).decode("utf-8").split("\n")
    rows = ([*line.split("\t"), number] for number, line in enumerate(lines, start=1))
    sentences: list[Sentence] = []
    words: list[Word] = []
    for row in rows:
        match row:
            case [str(form), str(upos), str(head), str(relation), int()]:
                words.append(Word(form, upos, int(head) - 1 if head != "0" else None, relation))
            case _ if words:
                sentences.append(_sentence(words))
                words = []
    return Corpus(
        "Universal Dependencies English Web Treebank, dev, first 500 sentences (UD_English-EWT @15d613d)",
        "CC BY-SA 4.0",
        tuple(sentences),
    )


def read_conllu(path: Path) -> Corpus:
    """Read a treebank in CoNLL-U.

    Raises:
        TreebankError: a line has not ten columns, an ID or HEAD is no number or out of range, FORM, UPOS or
            DEPREL is empty, the file is not UTF-8, or has no sentence.
        OSError: the file can't be read.
    """
    sentences = tuple(_read_sentences(_lines(path), path))
    if not sentences:
        raise TreebankError(f"{path} has no sentence: give a treebank in CoNLL-U")
    return Corpus(_name(path), "", sentences)


def read_texts(path: Path) -> Corpus:
    """Read plain lines, a text each; empty ones are passed over.

    Raises:
        TreebankError: the file is not UTF-8, or has no text.
        OSError: the file can't be read.
    """
    texts = tuple(Sentence(line.strip()) for _, line in _lines(path) if line.strip())
    if not texts:
        raise TreebankError(f"{path} has no text: write one a line")
    return Corpus(_name(path), "", texts)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of each line from 1, and the line without its end."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TreebankError(
                    f"{path}, line {number}: not UTF-8 (byte {error.start + 1} of the line): save it as UTF-8"
                ) from error
            yield number, line.rstrip("\r\n")


def _read_sentences(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[Sentence]:
    rows: list[tuple[int, list[str]]] = []
    for number, line in lines:
        if line.startswith("#"):
            continue
        if line.strip():
            columns = line.split("\t")
            if len(columns) != len(_COLUMNS):
                raise TreebankError(
                    f"{path}, line {number}: {len(columns)} columns, CoNLL-U has {len(_COLUMNS)}, with a tab "
                    "between each two"
                )
            if _is_word(columns[0], f"{path}, line {number}, column 1 (ID)"):
                rows.append((number, columns))
        elif rows:
            yield _parse(rows, path)
            rows = []
    if rows:
        yield _parse(rows, path)


def _is_word(identifier: str, where: str) -> bool:
    """Tell words from multiword tokens (1-2) and empty nodes (1.1)."""
    parts = identifier.replace("-", ".", 1).split(".")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(parts) > 2:  # noqa: PLR2004
        raise TreebankError(f"{where}: {identifier!r} is no number of a word, such as 1, 1-2 or 1.1")
    return len(parts) == 1


def _parse(rows: Sequence[tuple[int, list[str]]], path: Path) -> Sentence:
    words = []
    for place, (number, columns) in enumerate(rows):
        if int(columns[0]) != place + 1:
            raise TreebankError(
                f"{path}, line {number}, column 1 (ID): {columns[0]}, but the words before it make this "
                f"number {place + 1}"
            )
        for index in (_FORM, _UPOS, _DEPREL):
            if not columns[index].strip():
                raise TreebankError(
                    f"{path}, line {number}, column {index + 1} ({_COLUMNS[index]}): empty; write _ where "
                    "there is nothing to say"
                )
        words.append(
            Word(
                columns[_FORM],
                columns[_UPOS],
                _head(columns[_HEAD], place, len(rows), f"{path}, line {number}, column {_HEAD + 1} (HEAD)"),
                columns[_DEPREL],
            )
        )
    return _sentence(words)


def _head(text: str, place: int, num_words: int, where: str) -> int | None:
    if not (text.isascii() and text.isdigit() and int(text) <= num_words):
        raise TreebankError(f"{where}: {text!r}: it must be a number from 0 to {num_words}")
    if int(text) == place + 1:
        raise TreebankError(f"{where}: {text}: a word can't depend on itself")
    return int(text) - 1 if int(text) else None


def _sentence(words: Sequence[Word]) -> Sentence:
    return Sentence(" ".join(word.form for word in words), tuple(words))


def _name(path: Path) -> str:
    """Return the name of a file, or the whole path of a pipe: `63` alone says nothing about `/dev/fd/63`."""
    return path.name if path.is_file() else str(path)
