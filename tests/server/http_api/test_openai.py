"""`/v1/embeddings` with the options of OpenAI, vLLM, Voyage and Jina."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server.grpc_api.methods import CONVERSIONS
from attnlens_server.http_api.json_bodies import TRUNCATED
from attnlens_server.http_api.openai import OpenAIRoutes
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.operations.inputs import Prompt
from http_client import LONG, TEXTS, HttpClient, StubService, grpc_embeddings, same_bits
from mounted import Mounted
from served import ServerProcess

PATH = "/v1/embeddings"
PROMPTS = {"query": "query: ", "text-matching": "match: "}


def post(body: Any, **prompts: str) -> tuple[int, Any, StubService]:
    """Send a request to the routes without a model."""
    stub = StubService(np.ones((1, 4), np.float32))
    choice = PromptChoice(prompts)
    routes = OpenAIRoutes(cast("Any", stub), "model", 0, choice, accepts_token_ids=False)
    status, _, value = stub.post(routes.routes(), PATH, {"input": "a", **body})
    return status, value, stub


def problem(body: Any, **prompts: str) -> tuple[str, str]:
    status, value, _ = post(body, **prompts)
    assert status == 400
    return value["error"]["param"], value["error"]["message"]


# --- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["normalize", "normalized", "use_activation"])
def test_embeddings_are_not_normalized_if_the_request_says_so(
    name: str, http: HttpClient, minilm_server: ServerProcess
) -> None:
    raw = grpc_embeddings(minilm_server.address, TEXTS, normalize=False)
    found = http.post(PATH, {"input": TEXTS, name: False})["data"]
    assert same_bits([each["embedding"] for each in found], raw)
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1)


def test_voyages_and_jinas_names_are_those_of_openai(http: HttpClient) -> None:
    expected = http.post(PATH, {"input": TEXTS, "dimensions": 8, "encoding_format": "base64"})
    assert len(base64.b64decode(expected["data"][0]["embedding"])) == 32
    assert http.post(PATH, {"input": TEXTS, "output_dimension": 8, "embedding_type": "base64"}) == expected


@pytest.mark.parametrize(
    "options", [{"truncate": True}, {"truncation": True}, {"truncate_prompt_tokens": -1}]
)
def test_long_texts_are_truncated_if_the_request_says_so(options: dict[str, Any], http: HttpClient) -> None:
    status, cut = http.ask("POST", PATH, {"input": ["a", LONG], **options})
    assert status == 200
    assert http.headers[TRUNCATED.lower()] == "1"
    assert cut["usage"]["total_tokens"] == 3 + 256
    assert http.ask("POST", PATH, {"input": ["a"], **options})[0] == 200
    assert TRUNCATED.lower() not in http.headers


def test_a_limit_of_tokens_below_that_of_the_model_is_rejected() -> None:
    expected = "truncate_prompt_tokens is 4, and only the limit of the model is supported: use 256 or more"
    assert problem({"truncate_prompt_tokens": 4})[1].startswith(expected)
    assert problem({"truncate_prompt_tokens": -2})[0] == "truncate_prompt_tokens"
    assert post({"truncate_prompt_tokens": 256})[2].request.truncate is True


def test_truncation_on_the_other_side_is_rejected_if_a_text_is_too_long(http: HttpClient) -> None:
    body = {"truncate": True, "truncation_side": "left"}
    assert http.ask("POST", PATH, {"input": "a", **body})[0] == 200
    status, value = http.ask("POST", PATH, {"input": LONG, **body})
    assert status == 400
    assert value["error"]["message"].startswith(
        "truncation_side needs truncation on the left, but this model"
    )


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"input_type": "query"}, "query"),
        ({"input_type": "search_query"}, "query"),
        ({"task": "retrieval.query"}, "query"),
        ({"task": "text-matching"}, "text-matching"),
        ({"input_type": "document"}, None),
        ({"prompt_name": "query"}, "query"),
    ],
)
def test_the_purpose_of_texts_selects_the_prompt(body: dict[str, str], prompt: str | None) -> None:
    status, _, stub = post(body, **PROMPTS)
    assert status == 200
    assert stub.request.prompt == (None if prompt is None else Prompt(name=prompt))


@pytest.mark.parametrize("name", ["input_type", "task"])
@pytest.mark.parametrize("prompts", [{}, PROMPTS])
def test_an_unknown_purpose_is_rejected_with_the_known_ones(name: str, prompts: dict[str, str]) -> None:
    field, message = problem({name: "querry"}, **prompts)
    assert field == name
    assert message.startswith(f"{name} is querry: use one of query, search_query, ")
    assert all(known in message for known in ("document", "passage", "clustering", *prompts))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"dimensions": 4, "output_dimension": 8},
            "output_dimension is 8, but dimensions is 4: send one of them",
        ),
        (
            {"truncate": False, "truncation": True},
            "truncation is true, but truncate is false: send one of them",
        ),
        (
            {"normalize": True, "normalized": False},
            "normalized is false, but normalize is true: send one of them",
        ),
        (
            {"encoding_format": "float", "embedding_type": "base64"},
            "embedding_type is base64, but encoding_format is",
        ),
        ({"input_type": "query", "task": "text-matching"}, "task is text-matching, but input_type is query"),
        (
            {"prompt_name": "query", "task": "query"},
            "prompt_name is set in addition to task: send one of them",
        ),
    ],
)
def test_options_that_contradict_each_other_are_rejected(body: dict[str, Any], message: str) -> None:
    assert problem(body, **PROMPTS)[1].startswith(message)
    assert post({"dimensions": 4, "output_dimension": 4})[0] == 200


# --- Limits and long texts ------------------------------------------------------------------------


def test_a_request_may_have_as_many_texts_as_openais(http: HttpClient) -> None:
    found = http.post(PATH, {"input": ["a"] * 2048, "dimensions": 1})
    assert [each["index"] for each in found["data"]] == list(range(2048))
    status, value = http.ask("POST", PATH, {"input": ["a"] * 2049})
    assert status == 400
    assert value["error"]["message"] == "input has 2049 texts, but the limit is 2048: send several requests"


def test_the_error_for_a_long_text_names_the_option_of_the_client(http: HttpClient) -> None:
    status, value = http.ask("POST", PATH, {"input": [LONG]})
    assert (status, value["error"]["code"]) == (400, "context_length_exceeded")
    assert value["error"]["message"] == (
        "input[0] has 402 tokens, but the limit is 256: shorten it, or set truncate to true (in the openai "
        'package: extra_body={"truncate": True}), or start the server with --auto-truncate'
    )


@pytest.fixture(scope="module")
def truncating(minilm_bundle: Path) -> Iterator[Mounted]:
    """Return a server with --auto-truncate."""
    with Mounted(minilm_bundle, auto_truncate=True) as mounted:
        yield mounted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": [LONG]}),
        ("/embed", {"inputs": [LONG]}),
        ("/embed_all", {"inputs": [LONG]}),
        ("/similarity", {"inputs": {"source_sentence": LONG, "sentences": ["a"]}}),
        ("/v2/embed", {"texts": [LONG]}),
        ("/vectors", {"texts": [LONG]}),
        ("/api/embed", {"input": [LONG]}),
        ("/v1/attnlens/embed", {"inputs": [LONG]}),
        ("/v1/attnlens/encode", {"inputs": [LONG]}),
        ("/v1/attnlens/encode_stream", {"inputs": [LONG]}),
        ("/v1/attnlens/explain", {"inputs": [LONG]}),
        ("/v1/attnlens/compare", {"pairs": [{"a": LONG, "b": "a"}]}),
    ],
)
def test_all_apis_truncate_if_the_server_does_and_the_request_does_not_say(
    path: str, body: dict[str, Any], truncating: Mounted
) -> None:
    response = truncating.ask("POST", path, body)
    assert response.status == 200, response.body
    if path.startswith("/v1/attnlens/"):
        assert b'"truncated":true' in response.body
    else:
        assert response.headers[TRUNCATED.lower()] == "1"
    rejected = {"/vectors": None, "/v2/embed": "NONE", "/similarity": None}.get(path, False)
    if rejected is not None:
        assert truncating.ask("POST", path, {**body, "truncate": rejected}).status in (400, 422)


@pytest.mark.parametrize("method", ["Embed", "Encode", "Explain", "Compare", "Classify"])
@pytest.mark.parametrize("truncate", [None, False, True])
def test_a_message_without_truncate_leaves_it_to_the_server(method: str, truncate: bool | None) -> None:
    message = getattr(pb, f"{method}Request")(truncate=truncate)
    assert CONVERSIONS[method](message).truncate is truncate
