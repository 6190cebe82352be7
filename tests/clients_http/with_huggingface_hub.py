"""huggingface_hub."""

import asyncio
from typing import Any

import numpy as np
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError

from clients_http.server_under_test import DIMENSIONS, LONG, QUERY, RERANK_QUERY, SLOW, TEXTS, Server, raises


def client(server: Server, **options: Any) -> InferenceClient:
    return InferenceClient(base_url=server.url, **options)


def check_feature_extraction_has_the_vectors_of_grpc(server: Server) -> None:
    extract = client(server).feature_extraction
    found = extract(TEXTS, normalize=False)
    assert (str(found.dtype), found.shape) == ("float32", (len(TEXTS), 384))
    server.check(found, "raw")
    server.check(extract(TEXTS), "texts")
    server.check(extract(QUERY), "query")
    server.check(extract(LONG, truncate=True, truncation_direction="right"), "long")
    server.check(extract(TEXTS, dimensions=DIMENSIONS), "short")


def check_asynchronous_feature_extraction(server: Server) -> None:
    async def main() -> Any:
        async with AsyncInferenceClient(base_url=server.url) as asynchronous:
            return await asynchronous.feature_extraction(TEXTS)

    server.check(asyncio.run(main()), "texts")


def check_embed_all_returns_the_token_vectors_of_grpc(server: Server) -> None:
    for text, vectors in zip(TEXTS, server.vectors["tokens"], strict=True):
        [found] = client(server).feature_extraction(text, model=f"{server.url}/embed_all")
        np.testing.assert_array_equal(found, np.float32(vectors))


def check_text_classification_has_the_probabilities_of_grpc(server: Server) -> None:
    found = InferenceClient(base_url=server.classifier_url).text_classification(RERANK_QUERY)
    assert [(each.label, each.score) for each in found] == [tuple(label) for label in server.labels]
    [best] = InferenceClient(base_url=server.classifier_url).text_classification(RERANK_QUERY, top_k=1)
    assert (best.label, best.score) == tuple(server.labels[0])
    with raises(HfHubHTTPError, "is not a classifier") as errors:
        client(server).text_classification(RERANK_QUERY, model=f"{server.url}/predict")
    assert errors[0].response.status_code == 424


def check_health_and_info(server: Server) -> None:
    endpoint = InferenceClient(server.url, provider="hf-inference")
    info = endpoint.get_endpoint_info()
    assert (info["model_id"], info["max_input_length"]) == (server.model, 256)
    assert endpoint.health_check()


def check_errors_have_the_status_and_message(server: Server) -> None:
    extract = client(server).feature_extraction
    for options, messages in (
        ({"truncate": False}, ("402", "256")),
        ({"prompt_name": "query"}, ("prompt_name", "query")),
        ({"dimensions": 385}, ("dimensions", "385", "384")),
    ):
        with raises(HfHubHTTPError, *messages) as errors:
            extract(LONG, **options)
        assert errors[0].response.status_code == 422, errors[0]
        assert errors[0].response.json()["error_type"] == "Validation"
    with server.full(), raises(HfHubHTTPError, "try again later") as errors:
        extract(TEXTS)
    assert errors[0].response.status_code == 429
    assert errors[0].response.json()["error_type"] == "Overloaded"


def check_server_drops_the_work_of_a_call_that_timed_out(server: Server) -> None:
    with server.drops_work(), raises(InferenceTimeoutError):
        client(server, timeout=0.2).feature_extraction(SLOW)
