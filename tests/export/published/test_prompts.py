"""Prompts: read from a checkpoint, written to a bundle."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_export import SourceError
from attnlens_export.published.prompts import PROMPTS_FILE, Prompts, read_prompts, write_prompts

E5 = {"query": "query: ", "passage": "passage: "}


def write(directory: Path, **content: object) -> None:
    (directory / PROMPTS_FILE).write_text(json.dumps(content), encoding="utf-8")


def test_prompts_match_sentence_transformers(tmp_path: Path) -> None:
    write(tmp_path, prompts=E5 | {"document": None}, default_prompt_name="query")
    assert read_prompts(tmp_path) == Prompts(E5 | {"document": ""}, "query")
    write(tmp_path, prompts={}, default_prompt_name=None)
    assert read_prompts(tmp_path) == Prompts()
    assert read_prompts(tmp_path / "absent") == read_prompts(None) == Prompts()


def test_prompts_can_be_added_replaced_and_chosen(tmp_path: Path) -> None:
    assert read_prompts(None, E5, "passage") == Prompts(E5, "passage")
    write(tmp_path, prompts=E5, default_prompt_name="query")
    assert read_prompts(tmp_path, {"query": "q: "}, "") == Prompts(
        {"query": "q: ", "passage": "passage: "}, ""
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"prompts": [1]}, "prompts must be an object, not list"),
        ({"prompts": {"query": 5}}, "the prompt 'query' must be a string, not int"),
        ({"prompts": {"query": "\ud800"}}, "the prompt 'query' can't be encoded as UTF-8"),
        (
            {"prompts": E5, "default_prompt_name": "other"},
            "the default prompt is 'other', but the prompts are 'query'",
        ),
        ({"default_prompt_name": "query"}, "the prompts are none: add it with --prompt NAME=TEXT"),
    ],
)
def test_invalid_prompts_are_rejected(content: dict[str, object], message: str, tmp_path: Path) -> None:
    write(tmp_path, **content)
    with pytest.raises(SourceError, match=message):
        read_prompts(tmp_path)


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))), st.data()
)
def test_written_prompts_read_back(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str], data: st.DataObject
) -> None:
    prompts = Prompts(texts, data.draw(st.sampled_from(["", *texts])))
    directory = tmp_path_factory.mktemp("bundle")
    write_prompts(directory, prompts)
    assert read_prompts(directory) == prompts


def test_up_to_date_file_is_unchanged_and_other_keys_are_kept(tmp_path: Path) -> None:
    write_prompts(tmp_path, Prompts())
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, similarity_fn_name="cosine")
    before = (tmp_path / PROMPTS_FILE).read_bytes()
    write_prompts(tmp_path, Prompts())
    assert (tmp_path / PROMPTS_FILE).read_bytes() == before
    write_prompts(tmp_path, Prompts(E5, "query"))
    assert json.loads((tmp_path / PROMPTS_FILE).read_text(encoding="utf-8")) == {
        "similarity_fn_name": "cosine",
        "prompts": E5,
        "default_prompt_name": "query",
    }
    write_prompts(tmp_path, Prompts(E5))
    assert read_prompts(tmp_path) == Prompts(E5)
