"""Reading of CoNLL-U and text files, and the bundled treebank."""

from pathlib import Path

import pytest

from attnlens_analysis.heads import TreebankError, read_conllu, read_texts, shipped_treebank
from attnlens_analysis.heads.treebank import Word

GOOD = """\ufeff# text = I can't.
1\tI\tI\tPRON\t_\t_\t2\tnsubj\t_\t_
2-3\tcan't\t_\t_\t_\t_\t_\t_\t_\t_
2\tca\tcan\tAUX\t_\t_\t0\troot\t_\t_
2.1\tgo\tgo\tVERB\t_\t_\t_\t_\t0:root\t_
3\tn't\tnot\tPART\t_\t_\t2\tadvmod:neg\t_\t_

# a second sentence, without an empty line behind it
1\tNew York\tNew York\tPROPN\t_\t_\t0\troot\t_\t_"""


def test_words_are_read_and_multiword_tokens_and_empty_nodes_skipped(tmp_path: Path) -> None:
    path = tmp_path / "good.conllu"
    path.write_text(GOOD, encoding="utf-8")
    first, second = read_conllu(path).sentences
    assert first.text == "I ca n't"
    assert first.words == (
        Word("I", "PRON", 1, "nsubj"),
        Word("ca", "AUX", None, "root"),
        Word("n't", "PART", 1, "advmod:neg"),
    )
    assert second.words == (Word("New York", "PROPN", None, "root"),)


def line(
    identifier: str = "1", form: str = "a", upos: str = "X", head: str = "0", relation: str = "root"
) -> str:
    return f"{identifier}\t{form}\t_\t{upos}\t_\t_\t{head}\t{relation}\t_\t_\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# c\n1\ta\tb\n", "line 2: found 3 columns, but CoNLL-U has 10"),
        (line("x"), "line 1, column 1 (ID): 'x' is not a valid ID"),
        (line("1.2.3"), "line 1, column 1 (ID): '1.2.3' is not a valid ID"),
        (line("2"), "line 1, column 1 (ID): found 2, expected 1"),
        (
            line() + line("3", head="1"),
            "line 2, column 1 (ID): found 3, expected 2",
        ),
        (line(form=""), "line 1, column 2 (FORM): empty"),
        (line(upos=" "), "line 1, column 4 (UPOS): empty"),
        (line(relation=""), "line 1, column 8 (DEPREL): empty"),
        (line(head="_"), "line 1, column 7 (HEAD): '_' is not a number from 0 to 1"),
        (line(head="2"), "line 1, column 7 (HEAD): '2' is not a number from 0 to 1"),
        (line(head="1"), "line 1, column 7 (HEAD): 1: a word cannot depend on itself"),
        ("# nothing\n", "contains no sentences"),
    ],
)
def test_errors_include_line_and_column(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.conllu"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TreebankError) as caught:
        read_conllu(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_invalid_utf8_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "latin.conllu"
    path.write_bytes(line().encode() + b"2\tcaf\xe9\n")
    with pytest.raises(TreebankError, match=r"line 2: invalid UTF-8 at byte 6"):
        read_conllu(path)


def test_text_files_have_one_text_per_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("It rained.\r\n\n  So it was wet.\n", encoding="utf-8")
    corpus = read_texts(path)
    assert [sentence.text for sentence in corpus.sentences] == ["It rained.", "So it was wet."]
    assert not corpus.is_treebank
    path.write_text("\n\n", encoding="utf-8")
    with pytest.raises(TreebankError, match="contains no text"):
        read_texts(path)


def test_bundled_treebank_is_complete() -> None:
    corpus = shipped_treebank()
    assert corpus.is_treebank
    assert corpus.license == "CC BY-SA 4.0"
    words = [sentence.words or () for sentence in corpus.sentences]
    assert (len(words), sum(map(len, words))) == (500, 7621)
    assert corpus.sentences[0].text == "From the AP comes this story :"
    assert words[0][5] == Word("story", "NOUN", 3, "nsubj")
    # Each sentence is a tree with one root and heads within the sentence.
    for sentence in words:
        assert sum(word.head is None for word in sentence) == 1
        assert all(word.head is None or 0 <= word.head < len(sentence) for word in sentence)
