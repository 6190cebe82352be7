"""API of Weaviate's inference containers, with the bodies that Weaviate's Go client sends."""

from typing import Any, cast

import numpy as np
import pytest

from attnlens_server.errors import OverloadedError, ShuttingDownError
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.http_api.weaviate import DIALECT, WeaviateRoutes
from attnlens_server.operations.inputs import Prompt
from http_client import LONG, TEXTS, HttpClient, StubService, grpc_embeddings, same_bits
from served import ServerProcess
from toy_models import make_model

# encoding/json writes all fields of a Go structure.
GO_FIELDS = {"dims": 0, "vector": None, "error": "", "config": {"pooling_strategy": "masked_mean"}}


def post(stub: StubService, body: Any) -> tuple[int, dict[str, str], Any]:
    model = make_model(prompts={"query": "query: ", "document": "passage: "})
    routes = WeaviateRoutes(cast("Any", stub), model, PromptChoice(model.prompts))
    return stub.post(routes.routes(), "/vectors", body)


@pytest.mark.parametrize("path", ["/vectors", "/vectors/"])
def test_vectors_have_the_bits_of_grpc(path: str, http: HttpClient, minilm_server: ServerProcess) -> None:
    expected = grpc_embeddings(minilm_server.address, TEXTS)
    single = http.post(path, {"text": TEXTS[1], **GO_FIELDS})
    assert same_bits([single.pop("vector")], expected[1:2])
    assert single == {"text": TEXTS[1], "dim": 384, "dims": 384}
    several = http.post(path, {"texts": TEXTS, "config": {"task_type": "passage", "dimensions": None}})
    assert same_bits(several.pop("vectors"), expected)
    assert several == {"dim": 384, "dims": 384}


def test_dimensions_and_truncation(http: HttpClient, minilm_server: ServerProcess) -> None:
    expected = grpc_embeddings(minilm_server.address, [LONG], truncate=True, dimensions=64)
    assert same_bits(
        http.post("/vectors", {"texts": [LONG], "config": {"dimensions": 64}})["vectors"], expected
    )


@pytest.mark.parametrize(("task", "name"), [("query", "query"), ("passage", "document"), ("", None)])
def test_task_type_selects_the_prompt(task: str, name: str | None) -> None:
    stub = StubService(np.ones((1, 4), np.float32))
    assert post(stub, {"text": "a", "config": {"task_type": task}})[0] == 200
    assert stub.request.prompt == (Prompt(name=name) if name else None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON: Input data was truncated. Send a JSON object"),
        ({}, "text is missing, or texts is set as well: set one of them"),
        ({"text": "a", "texts": ["b"]}, "text is missing, or texts is set as well: set one of them"),
        ({"texts": []}, "texts is empty: send at least one text"),
        ({"text": 5}, "text is invalid: expected `str | null`, got `int`"),
        (
            {"text": "a", "config": {"dimensions": 385}},
            "config.dimensions is 385: use 1 to 384, or 0 for all",
        ),
    ],
)
def test_invalid_bodies_are_rejected(body: Any, message: str, http: HttpClient) -> None:
    assert http.ask("POST", "/vectors", body) == (400, {"error": message})


def test_other_errors_keep_their_status() -> None:
    assert DIALECT.status(ShuttingDownError("stopping")) == 503
    stub = StubService(np.ones((1, 4), np.float32))
    stub.error = OverloadedError("full", retry_after_s=2)
    status, headers, value = post(stub, {"text": "a"})
    assert (status, headers["retry-after"], value) == (429, "2", {"error": "full"})


@pytest.mark.parametrize("path", ["/.well-known/live", "/.well-known/ready"])
def test_probes_return_204_without_a_body(path: str, http: HttpClient) -> None:
    assert http.ask("GET", path) == (204, None)
    assert not {"content-length", "content-type", "transfer-encoding"} & set(http.headers)
    assert http.ask("GET", path) == (204, None)  # the connection is still usable


def test_meta_names_the_model(http: HttpClient) -> None:
    status, meta = http.ask("GET", "/meta")
    assert (status, meta["model"], len(meta["model_version"])) == (200, "all-MiniLM-L6-v2", 64)
