"""Cohere's API: results equal those over gRPC, errors have a message."""

from typing import Any, cast

import numpy as np
import pytest

from attnlens.embedding_types import EmbeddingType, quantize
from attnlens_server.errors import NotReadyError, OverloadedError
from attnlens_server.http_api.cohere import DIALECT, CohereRoutes
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.operations.inputs import Prompt
from http_client import LONG, TEXTS, HttpClient, StubService, grpc_embeddings, same_bits
from served import ServerProcess
from toy_models import make_model

PATH, MODEL = "/v2/embed", "all-MiniLM-L6-v2"
VECTORS = np.array([[0.5, -0.2, 0.1, 0.9], [-1, 0, 0.3, 0.2]], np.float32)
RANGES = np.array([[-1, -1, -1, -1], [1, 1, 1, 1]], np.float32)


def post(stub: StubService, body: Any, **changes: Any) -> tuple[int, dict[str, str], Any]:
    model = make_model(**changes)
    routes = CohereRoutes(cast("Any", stub), model, PromptChoice(model.prompts))
    return stub.post(routes.routes(), PATH, body)


def problem(http: HttpClient, **body: Any) -> tuple[int, str]:
    status, value = http.ask("POST", PATH, body)
    assert list(value) == ["message"]
    return status, value["message"]


def test_embeddings_have_the_bits_of_grpc(http: HttpClient, minilm_server: ServerProcess) -> None:
    found = http.post(PATH, {"model": MODEL, "texts": TEXTS, "input_type": "search_document"})
    assert same_bits(found["embeddings"]["float"], grpc_embeddings(minilm_server.address, TEXTS))
    assert found["texts"] == TEXTS
    assert found["response_type"] == "embeddings_by_type"
    assert found["meta"]["billed_units"]["input_tokens"] > 3 * len(TEXTS)
    assert found["id"] != http.post(PATH, {"texts": ["a"]})["id"]


def test_all_requested_types_are_returned(http: HttpClient, minilm_server: ServerProcess) -> None:
    short = grpc_embeddings(minilm_server.address, TEXTS, dimensions=64)
    body = {"texts": TEXTS, "embedding_types": ["float", "binary", "ubinary"], "output_dimension": 64}
    found = http.post(PATH, body)["embeddings"]
    assert same_bits(found["float"], short)
    bits = np.packbits(short > 0, axis=1)
    assert found["ubinary"] == bits.tolist()
    assert found["binary"] == (bits.astype(int) - 128).tolist()


def test_integers_use_the_ranges_of_the_bundle() -> None:
    body = {"texts": ["a", "b"], "embedding_types": ["int8", "uint8"]}
    status, _, found = post(StubService(VECTORS), body, embedding_ranges=RANGES)
    assert status == 200
    for name in ("int8", "uint8"):
        expected = quantize(VECTORS, EmbeddingType[name.upper()], RANGES)
        assert found["embeddings"][name] == expected.tolist()


@pytest.mark.parametrize(
    ("body", "ranges", "remedy"),
    [
        ({}, None, "this bundle lacks ranges: use binary, or export the model again"),
        ({"output_dimension": 2}, RANGES, "ranges are only known for full size: omit output_dimension"),
    ],
)
def test_integers_without_ranges_are_rejected(body: dict[str, Any], ranges: Any, remedy: str) -> None:
    status, _, value = post(
        StubService(VECTORS), {"texts": ["a"], "embedding_types": ["int8"], **body}, embedding_ranges=ranges
    )
    assert status == 400
    prefix = "embedding_types contains int8, which needs the range of each component, but "
    assert value["message"].startswith(prefix + remedy)


def test_input_type_selects_the_prompt() -> None:
    stub, prompts = StubService(VECTORS), {"query": "query: ", "passage": "passage: "}
    for input_type, name in (("search_query", "query"), ("search_document", "passage")):
        assert post(stub, {"texts": ["a"], "input_type": input_type}, prompts=prompts)[0] == 200
        assert stub.request.prompt == Prompt(name=name)
    post(stub, {"texts": ["a"]}, prompts=prompts)
    assert stub.request.prompt is None


def test_truncation(http: HttpClient, minilm_server: ServerProcess) -> None:
    expected = grpc_embeddings(minilm_server.address, [LONG], truncate=True)
    for options in ({}, {"truncate": "END"}):
        assert same_bits(http.post(PATH, {"texts": [LONG], **options})["embeddings"]["float"], expected)
    assert problem(http, texts=["a", LONG], truncate="NONE") == (
        400,
        "texts[1] has 402 tokens, but the limit is 256: shorten it, or omit truncate",
    )
    status, message = problem(http, texts=[LONG], truncate="START")
    assert status == 400
    assert message.startswith("truncate needs truncation on the left, but this model truncates on the right")
    assert http.ask("POST", PATH, {"texts": ["a"], "truncate": "START"})[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "texts is missing: set it"),
        ({"texts": []}, 400, "texts is empty: send at least one text"),
        ({"texts": "a"}, 400, "texts is invalid: expected `array | null`, got `str`"),
        ({"texts": ["a"], "model": "embed-v4.0"}, 404, "the model 'embed-v4.0' is not loaded"),
        (
            {"texts": ["a"], "input_type": "image"},
            400,
            "input_type is image: use one of classification, clustering, ",
        ),
        (
            {"texts": ["a"], "embedding_types": ["base64"]},
            400,
            "embedding_types[0] is base64: use one of binary, float, ",
        ),
        ({"texts": ["a"], "output_dimension": 385}, 400, "output_dimension is 385: use 1 to 384"),
        (
            {"images": ["data:"]},
            400,
            "images is a list, which is not supported: use [], or omit it, and send texts",
        ),
        (
            {"inputs": [{"content": [{"type": "text", "text": "a"}]}]},
            400,
            "inputs is a list, which is not supported: omit it, and send texts",
        ),
        ({"images": []}, 400, "texts is missing: set it"),
        ({"texts": ["a"], "max_tokens": 9}, 400, "max_tokens is 9, and only the limit of the model is"),
    ],
)
def test_invalid_bodies_are_rejected_by_field(
    body: dict[str, Any], status: int, message: str, http: HttpClient
) -> None:
    found = problem(http, **body)
    assert found[0] == status
    assert found[1].startswith(message)


def test_other_errors_keep_their_status() -> None:
    assert DIALECT.status(NotReadyError("starting")) == 503
    stub = StubService(VECTORS)
    stub.error = OverloadedError("full", retry_after_s=2)
    status, headers, value = post(stub, {"texts": ["a"]})
    assert (status, headers["retry-after"], value) == (429, "2", {"message": "full"})
