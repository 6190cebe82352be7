"""The recipe with the methods of a SentenceTransformer, compared with sentence-transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder import Encoder
from sentence_transformers import SentenceTransformer, util

from attnlens_client import InputTooLongError
from served import ServerProcess

TEXTS = ["A man is playing a guitar.", "It rained.", "Wet weather.", "", "Naïve café 😀 " * 200]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def oracle(minilm_dir: Path) -> Any:
    return SentenceTransformer(str(minilm_dir), device="cpu")


@pytest.fixture
def encoder(minilm_server: ServerProcess) -> Iterator[Encoder]:
    encoder = Encoder(minilm_server.address)
    yield encoder
    encoder.client.close()


@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
def test_methods_match_sentence_transformers(method: str, encoder: Encoder, oracle: Any) -> None:
    for texts in (TEXTS, TEXTS[0]):
        vectors, expected = getattr(encoder, method)(texts), getattr(oracle, method)(texts)
        assert (vectors.dtype, vectors.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=TOLERANCE)


def test_options_match_sentence_transformers(encoder: Encoder, oracle: Any) -> None:
    for options in (
        {"truncate_dim": 64},
        {"truncate_dim": 64, "normalize_embeddings": True},
        {"prompt": "query: ", "batch_size": 2, "show_progress_bar": False},
    ):
        vectors, expected = encoder.encode(TEXTS, **options), oracle.encode(TEXTS, **options)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(TypeError, match="precision"):
        encoder.encode(TEXTS, precision="int8")  # type: ignore[call-arg]


def test_similarities_match_sentence_transformers(encoder: Encoder, oracle: Any) -> None:
    vectors = encoder.encode(TEXTS)
    expected = oracle.similarity(vectors[:2], vectors).numpy()
    np.testing.assert_allclose(encoder.similarity(vectors[:2], vectors), expected, rtol=0, atol=TOLERANCE)
    one = encoder.similarity(vectors[0], vectors[1])
    np.testing.assert_allclose(one, expected[:1, 1:2], rtol=0, atol=TOLERANCE)
    assert encoder.similarity(np.zeros((1, 3)), np.ones((2, 3))).tolist() == [[0, 0]]


def test_arrays_of_texts_are_accepted_and_other_values_rejected(encoder: Encoder) -> None:
    texts: Any = np.array(TEXTS[:2])
    np.testing.assert_array_equal(encoder.encode(texts), encoder.encode(TEXTS[:2]))
    assert encoder.encode([]).shape == (0, 384)
    for wrong in ({"a": 1}, {"a"}, 5, b"bytes", [None]):
        with pytest.raises(TypeError):
            encoder.encode(wrong)  # type: ignore[arg-type]


def test_sentence_transformers_utilities_accept_the_encoder(encoder: Encoder) -> None:
    [hits] = util.semantic_search(encoder.encode_query(["rainy"]), encoder.encode_document(TEXTS), top_k=2)
    assert {hit["corpus_id"] for hit in hits} == {1, 2}
    model: Any = encoder
    [(_, *pair), *_] = util.paraphrase_mining(model, TEXTS)
    assert pair == [1, 2]


def test_long_texts_are_rejected_on_request(minilm_server: ServerProcess) -> None:
    encoder = Encoder(minilm_server.address, truncate=False)
    with encoder.client, pytest.raises(InputTooLongError):
        encoder.encode(TEXTS)


@pytest.mark.parametrize(
    ("prompts", "query", "document"),
    [
        ({"query": "Q: ", "passage": "P: "}, "query", "passage"),
        ({"document": "D: ", "passage": "P: "}, None, "document"),
        ({}, None, None),
    ],
)
def test_prompts_are_chosen_as_in_sentence_transformers(
    prompts: dict[str, str],
    query: str | None,
    document: str | None,
    encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    encode: Callable[..., None] = lambda _, **options: asked.append(options)  # noqa: E731
    monkeypatch.setattr(encoder, "prompts", prompts)
    monkeypatch.setattr(encoder, "encode", encode)
    encoder.encode_query("")
    encoder.encode_document("")
    encoder.encode_query("", prompt="own")
    wanted = [{"prompt": ""} if name is None else {"prompt_name": name} for name in (query, document)]
    assert asked == [*wanted, {"prompt": "own"}]
