"""Ollama's API: results equal those over gRPC, errors have one message."""

from typing import Any, cast

import numpy as np
import pytest

from attnlens_server.errors import NotReadyError, OverloadedError
from attnlens_server.http_api.ollama import DIALECT, OllamaRoutes
from http_client import LONG, TEXTS, HttpClient, StubService, grpc_embeddings, same_bits
from served import ServerProcess

PATH, MODEL = "/api/embed", "all-MiniLM-L6-v2"


@pytest.mark.parametrize("model", [MODEL, f"{MODEL}:latest", ""])
def test_embeddings_have_the_bits_of_grpc(model: str, http: HttpClient, minilm_server: ServerProcess) -> None:
    expected = grpc_embeddings(minilm_server.address, TEXTS, normalize=True)
    body = {"model": model, "input": TEXTS, "options": {"num_ctx": 256}, "keep_alive": "5m"}
    found = http.post(PATH, body)
    assert same_bits(found["embeddings"], expected)
    assert found["model"] == model
    assert found["prompt_eval_count"] > 3 * len(TEXTS)
    assert isinstance(found["total_duration"], int)
    assert found["total_duration"] > 1000  # nanoseconds
    assert found["load_duration"] == 0
    assert same_bits(http.post(PATH, {"model": model, "input": TEXTS[0]})["embeddings"], expected[:1])


def test_dimensions_and_truncation(http: HttpClient, minilm_server: ServerProcess) -> None:
    expected = grpc_embeddings(minilm_server.address, [LONG], normalize=True, truncate=True, dimensions=64)
    body = {"model": MODEL, "input": LONG, "dimensions": 64}
    assert same_bits(http.post(PATH, body)["embeddings"], expected)
    assert http.ask("POST", PATH, {**body, "truncate": False}) == (
        400,
        {"error": "input[0] has 402 tokens, but the limit is 256: shorten it, or set truncate"},
    )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": MODEL}, 400, "input is missing: set it"),
        ({"model": MODEL, "input": []}, 400, "input is empty: send at least one text"),
        ({"model": MODEL, "input": [1]}, 400, "input[0] is invalid: expected `str`, got `int`"),
        (
            {"model": "llama3", "input": "a"},
            404,
            f"the model 'llama3' is not loaded: use '{MODEL}', or leave the name empty",
        ),
    ],
)
def test_invalid_bodies_are_rejected(body: Any, status: int, message: str, http: HttpClient) -> None:
    assert http.ask("POST", PATH, body) == (status, {"error": message})


def test_other_errors_keep_their_status() -> None:
    assert DIALECT.status(NotReadyError("starting")) == 503
    stub = StubService(np.ones((1, 4), np.float32))
    stub.error = OverloadedError("full", retry_after_s=2)
    status, headers, value = stub.post(OllamaRoutes(cast("Any", stub)).routes(), PATH, {"input": "a"})
    assert (status, headers["retry-after"], value) == (429, "2", {"error": "full"})
