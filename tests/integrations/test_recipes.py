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
    """Return the query vector (D,) and the text vectors (N, D). The long text is truncated."""
    return client.embed([QUERY])[0], client.embed(TEXTS, truncate=True)


def test_every_recipe_was_run(answers: Answers) -> None:
    assert sorted(answers) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_recipe_prints_the_same_hits_as_numpy(name: str, answers: Answers, client: Client) -> None:
    texts = [json.loads(line)["text"] for line in (RECIPES / "corpus.jsonl").read_text("utf-8").splitlines()]
    cosines = client.embed(texts) @ client.embed([QUERY])[0]
    hits = [f"{cosines[place]:.4f} {texts[place]}" for place in np.argsort(-cosines)[:3]]
    assert answers[name]["printed"].splitlines()[:3] == hits


@pytest.mark.parametrize("name", NAMES)
def test_page_shows_the_output_of_a_recipe(name: str, answers: Answers) -> None:
    assert textwrap.indent(answers[name]["printed"], "    ") in PAGE


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_returns_the_server_vectors(name: str, answers: Answers, expected: tuple[Any, Any]) -> None:
    """The texts include an empty and a truncated text. For LanceDB, the stored vectors are compared."""
    query, texts = expected
    np.testing.assert_allclose(answers[name]["query"], query, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(answers[name]["texts"], texts, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["with_langchain", "with_llama_index"])
def test_concurrent_asynchronous_calls_return_the_same_vectors(
    name: str, answers: Answers, expected: tuple[Any, Any]
) -> None:
    for found, wanted in zip(answers[name]["together"], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["with_haystack", "with_langchain", "with_llama_index"])
def test_no_texts_return_no_vectors(name: str, answers: Answers) -> None:
    assert answers[name]["nothing"] == []


def test_haystack_keeps_metadata_and_does_not_modify_its_input(answers: Answers) -> None:
    assert answers["with_haystack"]["places"] == [0, 1, 2, 3]
    assert answers["with_haystack"]["given"] == [None] * 4


def test_serialized_llama_index_embedding_has_its_class_and_server(answers: Answers, client: Client) -> None:
    stored = answers["with_llama_index"]["stored"]
    assert (stored["class_name"], stored["address"]) == ("AttnlensEmbedding", client.address)
    assert stored["model_name"] == client.get_model().name


def test_chroma_stores_the_embedding_function_of_a_collection(answers: Answers) -> None:
    assert answers["with_chroma"]["found"] == [[TEXTS[0]]]


def test_lancedb_embeds_queries_after_reopening_a_table(answers: Answers) -> None:
    assert answers["with_lancedb"]["found"] == 1


def test_duckdb_table_rejects_vectors_of_another_corpus(answers: Answers) -> None:
    assert "length 13 but got length 12" in answers["with_duckdb"]["refused"]


def test_duckdb_explanation_matches_the_server(answers: Answers, client: Client) -> None:
    hits = [line.partition(" ")[2] for line in answers["with_duckdb"]["printed"].splitlines()]
    [why] = client.explain([QUERY], to=hits[0], rather_than=hits[1], level="words")
    shown = ", ".join(f"{word} {score:+.3f}" for word, score in why.top(3))
    assert answers["with_duckdb"]["printed"].splitlines()[3].endswith(f": {shown}")
