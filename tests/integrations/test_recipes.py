"""Recipes pass vectors of the server to frameworks and databases, whose search results match numpy."""

import json
import textwrap
from typing import Any

import numpy as np
import pytest

from attnlens_client import Client
from integrations.asked import QUERY, RECIPES, TEXTS

pytestmark = pytest.mark.integrations

PAGE = (RECIPES.parents[1] / "docs" / "integrations.md").read_text("utf-8")

Answers = dict[str, dict[str, Any]]

NAMES = sorted(path.stem for path in RECIPES.glob("with_*.py"))
ADAPTERS = ["with_chroma", "with_haystack", "with_lancedb", "with_langchain", "with_llama_index"]
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def expected(client: Client) -> tuple[Any, Any]:
    """The vector of the query (D,), and those of the texts (N, D), the long one cut."""
    return client.embed([QUERY])[0], client.embed(TEXTS, truncate=True)


def test_every_recipe_was_asked(answers: Answers) -> None:
    assert sorted(answers) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_prints_the_hits_that_numpy_finds(name: str, answers: Answers, client: Client) -> None:
    texts = [json.loads(line)["text"] for line in (RECIPES / "corpus.jsonl").read_text("utf-8").splitlines()]
    cosines = client.embed(texts) @ client.embed([QUERY])[0]
    hits = [f"{cosines[place]:.4f} {texts[place]}" for place in np.argsort(-cosines)[:3]]
    assert answers[name]["printed"].splitlines()[:3] == hits


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_what_a_recipe_prints(name: str, answers: Answers) -> None:
    assert textwrap.indent(answers[name]["printed"], "    ") in PAGE


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_returns_the_vectors_of_the_server(
    name: str, answers: Answers, expected: tuple[Any, Any]
) -> None:
    """An empty text and one that is cut among them; in LanceDB as they were stored."""
    query, texts = expected
    np.testing.assert_allclose(answers[name]["query"], query, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(answers[name]["texts"], texts, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["with_langchain", "with_llama_index"])
def test_asynchronous_calls_beside_each_other_return_the_same(
    name: str, answers: Answers, expected: tuple[Any, Any]
) -> None:
    for found, wanted in zip(answers[name]["together"], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["with_haystack", "with_langchain", "with_llama_index"])
def test_of_no_texts_there_are_no_vectors(name: str, answers: Answers) -> None:
    assert answers[name]["nothing"] == []


def test_haystack_keeps_metadata_and_the_documents_that_it_was_given(answers: Answers) -> None:
    assert answers["with_haystack"]["places"] == [0, 1, 2, 3]
    assert answers["with_haystack"]["given"] == [None] * 4


def test_a_stored_llama_index_embedding_names_its_class_and_server(answers: Answers, client: Client) -> None:
    stored = answers["with_llama_index"]["stored"]
    assert (stored["class_name"], stored["address"]) == ("AttnlensEmbedding", client.address)
    assert stored["model_name"] == client.get_model().name


def test_chroma_remembers_which_function_a_collection_has(answers: Answers) -> None:
    assert answers["with_chroma"]["found"] == [[TEXTS[0]]]


def test_lancedb_embeds_queries_of_a_table_that_was_opened_again(answers: Answers) -> None:
    assert answers["with_lancedb"]["found"] == 1


def test_the_table_in_duckdb_refuses_vectors_of_another_corpus(answers: Answers) -> None:
    assert "length 13 but got length 12" in answers["with_duckdb"]["refused"]


def test_the_reasons_in_duckdb_are_those_of_the_server(answers: Answers, client: Client) -> None:
    hits = [line.partition(" ")[2] for line in answers["with_duckdb"]["printed"].splitlines()]
    [why] = client.explain([QUERY], to=hits[0], rather_than=hits[1], level="words")
    shown = ", ".join(f"{word} {score:+.3f}" for word, score in why.top(3))
    assert answers["with_duckdb"]["printed"].splitlines()[3].endswith(f": {shown}")
