"""Limits of JSON bodies apply before their values are converted."""

import json
import tracemalloc
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens_server.errors import InvalidFieldsError
from attnlens_server.http_api import exchange, json_bodies
from attnlens_server.http_api.cohere import CohereRoutes
from attnlens_server.http_api.exchange import BodyError, check_values, parsed_bytes
from attnlens_server.http_api.ollama import OllamaRoutes
from attnlens_server.http_api.openai import OpenAIRoutes
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.http_api.tei import TeiRoutes
from attnlens_server.http_api.transcoding import fill_message
from attnlens_server.http_api.weaviate import WeaviateRoutes
from attnlens_server.text import Input, TokenIds
from http_client import StubService
from toy_models import make_model


def post(path: str, body: Any) -> tuple[int, dict[str, str], Any, StubService]:
    """Send a request to routes whose service does not validate it."""
    stub = StubService(np.ones((1, 4), np.float32))
    service, model, prompts = cast("Any", stub), make_model(), PromptChoice({})
    routes = [
        *OpenAIRoutes(service, model.name, 0, prompts, accepts_token_ids=True).routes(),
        *TeiRoutes(service, model, cast("Any", None), cast("Any", None)).routes(),
        *CohereRoutes(service, model, prompts).routes(),
        *WeaviateRoutes(service, model, prompts).routes(),
        *OllamaRoutes(service).routes(),
    ]
    return *stub.post(routes, path, body), stub


MANY = ["a"] * 513


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": MANY}),
        ("/v1/embeddings", {"input": [[1]] * 513}),
        ("/embed", {"inputs": MANY}),
        ("/embed_all", {"inputs": MANY}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": MANY}}),
        ("/tokenize", {"inputs": MANY}),
        ("/decode", {"ids": [[1]] * 513}),
        ("/v2/embed", {"texts": MANY}),
        ("/vectors", {"texts": MANY}),
        ("/api/embed", {"input": MANY}),
    ],
)
def test_texts_are_counted_before_they_are_converted(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_bodies, "Input", None)
    status, _, reply, _ = post(path, body)
    assert status in (400, 422)
    assert "has 513 texts, but the limit is 512: send several requests" in str(reply)


def test_memory_of_values_is_reserved_before_they_are_parsed() -> None:
    status, _, reply, stub = post("/embed", {"inputs": [[]] * 16_000})
    assert (status, reply["error_type"]) == (413, "Validation")
    assert "bytes of memory, and the limit for all calls is 1048576" in reply["error"]
    assert stub.admission.memory.used == 0


NUMBERS = ",".join(map(str, range(10_000, 30_000)))


@pytest.mark.parametrize(
    "body", ["[" + "[]," * 20_000 + "[]]", f"[{NUMBERS}]", "[" + "[1,999]," * 9_000 + "1]"]
)
def test_memory_of_parsed_values_is_an_upper_bound(body: str) -> None:
    encoded = body.encode()
    tracemalloc.start()
    value = msgspec.json.decode(encoded)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < parsed_bytes(encoded) < 8 * size
    del value


def test_memory_of_token_ids_includes_the_numbers() -> None:
    tracemalloc.start()
    given = Input(token_ids=TokenIds(msgspec.json.decode(f"[{NUMBERS}]")))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * size < given.memory_bytes < 1.5 * size


@pytest.mark.parametrize("values", [["x" * 1_000_000] + [1] * 1000, [["x" * 1_000_000] * 1000, [1]]])
def test_arrays_with_long_strings_take_little_memory(values: list[Any]) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidFieldsError, match="direction is not a"):
        fill_message(pb.ExplainRequest(), {"direction": values}, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


JSON_VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\[{,é'),
    lambda values: st.lists(values) | st.dictionaries(st.text(alphabet='"\\[a'), values),
)


def count_values(value: Any) -> int:
    """Return the number of lists, objects and strings, with keys."""
    if isinstance(value, str):
        return 1
    if isinstance(value, list):
        return 1 + sum(map(count_values, value))
    if isinstance(value, dict):
        return 1 + sum(1 + count_values(each) for each in value.values())
    return 0


@given(JSON_VALUES)
def test_lists_objects_and_strings_of_a_body_are_counted_without_parsing_it(value: Any) -> None:
    body, count = json.dumps(value).encode(), count_values(value)
    for scanned_bytes in (3, 1 << 16):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(exchange, "_SCANNED_BYTES", scanned_bytes)
            patched.setattr(exchange, "MAX_OTHER_VALUES", count)
            check_values(body, max_texts=0)
            if count:
                patched.setattr(exchange, "MAX_OTHER_VALUES", count - 1)
                with pytest.raises(BodyError):
                    check_values(body, max_texts=0)
