"""Reads corpora: CoNLL-U treebanks, the bundled treebank, or plain text files.

See https://universaldependencies.org/format.html for CoNLL-U. The columns FORM, UPOS, HEAD and DEPREL are
used. Multiword tokens (1-2) and empty nodes (1.1) are skipped, since they are not part of the basic tree.
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_FORM, _UPOS, _HEAD, _DEPREL = (_COLUMNS.index(name) for name in ("FORM", "UPOS", "HEAD", "DEPREL"))
_SHIPPED = Path(__file__).parent / "data" / "ud_en_ewt_dev_500.tsv.gz"


class TreebankError(Exception):
    """Invalid file. The message includes the file name, line and column."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a treebank sentence.

    Attributes:
        form: Word form.
        upos: Universal part-of-speech tag, e.g. NOUN.
        head: Index of the head word. None for the root.
        relation: Dependency relation to the head, including its subtype, e.g. `nsubj` or `aux:pass`.
    """

    form: str
    upos: str
    head: int | None
    relation: str


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text, with its words if it comes from a treebank.

    Attributes:
        text: Text. Words of a treebank are separated by single spaces.
        words: Annotated words. None for plain text.
    """

    text: str
    words: tuple[Word, ...] | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sentences to measure heads on.

    Attributes:
        name: Name for the report.
        license: License of the data. Empty if unknown.
        sentences: Sentences in file order.
    """

    name: str
    license: str
    sentences: tuple[Sentence, ...]

    @property
    def is_treebank(self) -> bool:
        """Whether all sentences are annotated with words and relations."""
        return all(sentence.words is not None for sentence in self.sentences)


def shipped_treebank() -> Corpus:
    """Return the 500 bundled sentences. See `data/LICENSE.md` for their license."""
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
    """Read a CoNLL-U treebank.

    Raises:
        TreebankError: The file is not valid CoNLL-U, not UTF-8, or contains no sentences.
        OSError: The file cannot be read.
    """
    sentences = tuple(_read_sentences(_lines(path), path))
    if not sentences:
        raise TreebankError(f"{path} contains no sentences. Use a treebank in CoNLL-U format.")
    return Corpus(_name(path), "", sentences)


def read_texts(path: Path) -> Corpus:
    """Read a text file with one text per line. Empty lines are skipped.

    Raises:
        TreebankError: The file is not UTF-8 or contains no text.
        OSError: The file cannot be read.
    """
    texts = tuple(Sentence(line.strip()) for _, line in _lines(path) if line.strip())
    if not texts:
        raise TreebankError(f"{path} contains no text. Write one text per line.")
    return Corpus(_name(path), "", texts)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line numbers, counted from 1, and lines without line breaks."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TreebankError(
                    f"{path}, line {number}: invalid UTF-8 at byte {error.start + 1}. Save the file as UTF-8."
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
                    f"{path}, line {number}: found {len(columns)} columns, but CoNLL-U has {len(_COLUMNS)} "
                    "columns separated by tabs"
                )
            if _is_word(columns[0], f"{path}, line {number}, column 1 (ID)"):
                rows.append((number, columns))
        elif rows:
            yield _parse(rows, path)
            rows = []
    if rows:
        yield _parse(rows, path)


def _is_word(identifier: str, where: str) -> bool:
    """Return whether an ID denotes a word, not a multiword token (1-2) or an empty node (1.1)."""
    parts = identifier.replace("-", ".", 1).split(".")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(parts) > 2:  # noqa: PLR2004
        raise TreebankError(f"{where}: {identifier!r} is not a valid ID such as 1, 1-2 or 1.1")
    return len(parts) == 1


def _parse(rows: Sequence[tuple[int, list[str]]], path: Path) -> Sentence:
    words = []
    for index, (number, columns) in enumerate(rows):
        if int(columns[0]) != index + 1:
            raise TreebankError(
                f"{path}, line {number}, column 1 (ID): found {columns[0]}, expected {index + 1}"
            )
        for column in (_FORM, _UPOS, _DEPREL):
            if not columns[column].strip():
                raise TreebankError(
                    f"{path}, line {number}, column {column + 1} ({_COLUMNS[column]}): empty. Use _ for "
                    "unspecified values."
                )
        words.append(
            Word(
                columns[_FORM],
                columns[_UPOS],
                _head(columns[_HEAD], index, len(rows), f"{path}, line {number}, column {_HEAD + 1} (HEAD)"),
                columns[_DEPREL],
            )
        )
    return _sentence(words)


def _head(text: str, index: int, num_words: int, where: str) -> int | None:
    if not (text.isascii() and text.isdigit() and int(text) <= num_words):
        raise TreebankError(f"{where}: {text!r} is not a number from 0 to {num_words}")
    if int(text) == index + 1:
        raise TreebankError(f"{where}: {text}: a word cannot depend on itself")
    return int(text) - 1 if int(text) else None


def _sentence(words: Sequence[Word]) -> Sentence:
    return Sentence(" ".join(word.form for word in words), tuple(words))


def _name(path: Path) -> str:
    """Return the name of a file, or the full path of a pipe such as `/dev/fd/63`."""
    return path.name if path.is_file() else str(path)
