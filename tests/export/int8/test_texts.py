"""The texts of int8: read, divided, written."""

import itertools
from pathlib import Path

import pytest

from attnlens_export import SourceError
from attnlens_export.int8.texts import (
    KINDS,
    read_kinds,
    read_written,
    split_texts,
    write_texts,
)


def test_too_few_texts_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("one text\n\nanother\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"texts\.txt has 2 texts, but at least 20"):
        read_kinds(path)


def test_custom_texts_are_an_additional_kind(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(f" text {number} " for number in range(20)), encoding="utf-8")
    kinds = read_kinds(path)
    assert list(kinds) == [*KINDS, "given"]
    assert kinds.pop("given") == [f"text {number}" for number in range(20)]
    assert kinds == read_kinds(None)


def test_three_sets_share_no_text_but_the_empty_one() -> None:
    for kind, texts in read_kinds(None).items():
        sets = split_texts(texts)
        for first, second in itertools.combinations(map(set, sets), 2):
            assert first & second == ({""} if kind == "very_short" else set())
        assert set().union(*sets) == set(texts)
        assert [len(members) for members in sets] == pytest.approx(
            [len(texts) / 2, len(texts) / 4, len(texts) / 4], abs=2
        )


def test_written_texts_are_read_by_kind(tmp_path: Path) -> None:
    kinds = {"short": ["", "a"], "none": [], "long": ["a b c"]}
    write_texts(tmp_path / "texts.txt", kinds)
    assert read_written(tmp_path / "texts.txt", {kind: len(each) for kind, each in kinds.items()}) == kinds
