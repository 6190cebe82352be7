"""API of Text Embeddings Inference: results equal those over gRPC, errors have TEI's types."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer

from attnlens_client import Client, TokenIds
from attnlens_server.config import ServerConfig
from attnlens_server.core.admission import Budget
from attnlens_server.errors import (
    InputTooLongError,
    InternalError,
    NotReadyError,
    NotSupportedError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    ResponseTooLargeError,
    ShuttingDownError,
)
from attnlens_server.http_api.tei import DIALECT, TeiRoutes
from attnlens_server.operations.inputs import Prompt
from attnlens_server.operations.tokenize import TokenizedText, TokenizeRequest
from attnlens_server.text import TextEncoder
from http_client import LONG, TEXTS, HttpClient, StubService, grpc_embeddings, same_bits
from served import ServerProcess
from toy_models import make_model

UNIT = np.eye(2, 4, dtype=np.float32)


def problem(http: HttpClient, path: str, body: Any) -> tuple[int, str, str]:
    status, value = http.ask("POST", path, body)
    return status, value["error_type"], value["error"]


@pytest.fixture
def stub() -> StubService:
    return StubService(UNIT)


def post(stub: StubService, path: str, body: Any, prompt: str = "query: ") -> tuple[int, dict[str, str], Any]:
    engine = SimpleNamespace(runtime=SimpleNamespace(is_on_cpu=False))
    model = make_model(prompts={"query": prompt})
    routes = TeiRoutes(cast("Any", stub), model, ServerConfig(bundle=Path()), cast("Any", engine))
    return stub.post(routes.routes(), path, body)


@pytest.mark.parametrize("path", ["/", "/embed"])
def test_embeddings_have_the_bits_of_grpc(path: str, http: HttpClient, minilm_server: ServerProcess) -> None:
    expected = grpc_embeddings(minilm_server.address, TEXTS, normalize=True)
    assert same_bits(http.post(path, {"inputs": TEXTS}), expected)
    assert same_bits(http.post(path, {"inputs": TEXTS[0], "truncate": None}), expected[:1])


def test_normalization_and_dimensions_are_options(http: HttpClient, minilm_server: ServerProcess) -> None:
    raw = grpc_embeddings(minilm_server.address, TEXTS, normalize=False)
    assert same_bits(http.post("/embed", {"inputs": TEXTS, "normalize": False}), raw)
    short = grpc_embeddings(minilm_server.address, TEXTS, normalize=True, dimensions=64)
    assert same_bits(http.post("/embed", {"inputs": TEXTS, "dimensions": 64}), short)


def test_token_ids_are_used_unchanged(http: HttpClient, minilm_server: ServerProcess) -> None:
    ids = [101, 1037, 2158, 102]
    with Client(minilm_server.address) as client:
        expected = client.embed([TokenIds(ids), TokenIds([1037])], normalize=True)
    assert same_bits(http.post("/embed", {"inputs": ids}), expected[:1])
    assert same_bits(http.post("/embed", {"inputs": [ids, [1037]]}), expected)
    assert same_bits(http.post("/embed", {"inputs": [[1037], "A man"]})[:1], expected[1:])


def test_token_vectors_have_the_bits_of_grpc(http: HttpClient, minilm_server: ServerProcess) -> None:
    with Client(minilm_server.address) as client:
        encoded = client.encode(TEXTS)
    found = http.post("/embed_all", {"inputs": TEXTS})
    for vectors, text in zip(found, encoded, strict=True):
        assert same_bits(vectors, text.last_hidden_state)
    assert http.headers["x-compute-tokens"] == str(sum(map(len, found)))


def test_long_texts_are_truncated_by_default(http: HttpClient, minilm_server: ServerProcess) -> None:
    expected = grpc_embeddings(minilm_server.address, [LONG], normalize=True, truncate=True)
    for direction in (None, "Right", "right"):
        body = {"inputs": LONG, "truncation_direction": direction}
        assert same_bits(http.post("/embed", body), expected)
    assert problem(http, "/embed", {"inputs": ["a", LONG], "truncate": False}) == (
        422,
        "Validation",
        "inputs[1] has 402 tokens, but the limit is 256: shorten it, or set truncate",
    )


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
def test_truncation_on_the_other_side_is_only_rejected_for_long_texts(path: str, http: HttpClient) -> None:
    assert http.ask("POST", path, {"inputs": "a", "truncation_direction": "Left"})[0] == 200
    status, kind, message = problem(http, path, {"inputs": LONG, "truncation_direction": "Left"})
    assert (status, kind) == (422, "Validation")
    assert message == (
        "truncation_direction needs truncation on the left, but this model truncates on the right, and a "
        "text has 402 tokens, while the limit is 256: shorten it, or omit truncation_direction"
    )


@pytest.mark.parametrize(
    ("own_side", "options", "truncates"),
    [
        ("left", {"truncation_direction": "Left"}, True),
        ("left", {"truncation_direction": "Right"}, False),
        ("left", {}, True),
        ("right", {"truncation_direction": "Left", "truncate": False}, False),
    ],
)
def test_model_truncates_only_on_its_side(own_side: str, options: dict[str, Any], *, truncates: bool) -> None:
    stub = StubService(UNIT, truncation_side=own_side)
    assert post(stub, "/embed", {"inputs": "a", **options})[0] == 200
    assert stub.request.truncate == truncates


def test_prompt_is_passed_by_name(stub: StubService) -> None:
    post(stub, "/embed", {"inputs": "a", "prompt_name": "query"})
    assert stub.request.prompt == Prompt(name="query")
    parameters = {"prompt_name": "query", "truncate": False}
    inputs = {"source_sentence": "a", "sentences": ["b"]}
    assert post(stub, "/similarity", {"inputs": inputs, "parameters": parameters})[2] == [0.0]
    assert stub.request.prompt == Prompt(name="query")
    assert not stub.request.truncate


def test_similarity_is_the_cosine(http: HttpClient, minilm_server: ServerProcess) -> None:
    source, *others = grpc_embeddings(minilm_server.address, TEXTS, normalize=True).astype(np.float64)
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}
    assert http.post("/similarity", body) == pytest.approx([other @ source for other in others], abs=1e-7)


def test_headers_state_the_cost(http: HttpClient) -> None:
    http.post("/embed", {"inputs": ["a", "Füße"]})
    assert http.headers["x-compute-type"] == "cpu"
    assert http.headers["x-compute-characters"] == "5"
    assert int(http.headers["x-compute-tokens"]) > 4
    names = ("total", "tokenization", "queue", "inference")
    total, *steps = (int(http.headers[f"x-{name}-time"]) for name in names)
    assert http.headers["x-compute-time"] == str(total)
    assert total > 0
    assert all(0 <= step <= total for step in steps)


def test_tokens_have_byte_offsets_into_the_text(http: HttpClient) -> None:
    text = "Füße, naïveté!"
    [tokens] = http.post("/tokenize", {"inputs": text})
    assert [token["text"] for token in (tokens[0], tokens[-1])] == ["[CLS]", "[SEP]"]
    assert tokens[0] == {"id": 101, "text": "[CLS]", "special": True}
    for token in tokens[1:-1]:
        assert not token["special"]
        assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    assert "".join(token["text"] for token in tokens[1:-1]) == text.replace(" ", "")
    assert http.post("/tokenize", {"inputs": [text], "add_special_tokens": False}) == [tokens[1:-1]]


def test_offsets_refer_to_the_prompt_and_the_text(stub: StubService, minilm_bundle: Path) -> None:
    encoder = TextEncoder(minilm_bundle / "tokenizer.json", 256)

    async def tokenize(request: TokenizeRequest, _: Budget) -> AsyncIterator[list[TokenizedText]]:
        texts = [each.texts for each in request.inputs]
        for encoded in encoder.encode(texts, prompt="é: ", with_record=True):
            yield [TokenizedText(encoder.describe(encoded), exceeds_max_tokens=False)]

    stub.tokenize = tokenize  # type: ignore[attr-defined]
    body = {"inputs": ["naïve", "a"], "prompt_name": "query", "add_special_tokens": False}
    first, second = post(stub, "/tokenize", body, prompt="é: ")[2]
    for tokens, text in ((first, "é: naïve"), (second, "é: a")):
        assert "".join(token["text"] for token in tokens) == text.replace(" ", "")
        assert [text.encode()[token["start"] : token["stop"]].decode() for token in tokens] == [
            token["text"] for token in tokens
        ]


def test_many_texts_are_tokenized_in_order(http: HttpClient) -> None:
    texts = [f"{number} {'word ' * 5000}" for number in range(8)]  # several portions
    found = http.post("/tokenize", {"inputs": texts})
    assert [tokens[1]["text"] for tokens in found] == [str(number) for number in range(8)]
    assert {len(tokens) for tokens in found} == {5003}


def test_decoding_is_that_of_the_tokenizer(http: HttpClient, minilm_bundle: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    assert http.post("/decode", {"ids": ids}) == tokenizer.decode_batch(ids)
    whole = tokenizer.decode(ids[0], skip_special_tokens=False)
    assert http.post("/decode", {"ids": ids[0], "skip_special_tokens": False}) == [whole]


def test_info_describes_the_model_and_the_limits(http: HttpClient) -> None:
    status, info = http.ask("GET", "/info")
    assert status == 200
    assert info["model_id"] == info["served_model_name"] == "all-MiniLM-L6-v2"
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["model_dtype"], info["auto_truncate"]) == ("float32", True)
    assert (info["max_input_length"], info["max_client_batch_size"]) == (256, 2048)
    assert problem(http, "/embed", {"inputs": ["a"] * 2049})[:2] == (422, "Validation")


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_checks_have_no_body(path: str, http: HttpClient) -> None:
    assert http.ask("GET", path) == (200, None)


def test_sparse_embeddings_are_rejected_as_by_tei(http: HttpClient) -> None:
    status, kind, message = problem(http, "/embed_sparse", {"inputs": "a"})
    assert (status, kind) == (424, "Backend")
    assert message == "/embed_sparse needs a sparse model, which attnlens does not serve"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/embed", {"inputs": []}, (400, "Empty", "the list of inputs is empty: send at least one")),
        ("/decode", {"ids": []}, (400, "Empty", "the list of inputs is empty: send at least one")),
        ("/embed", {}, (422, "Validation", "inputs is missing: set it")),
        ("/embed", b"{", (400, "Validation", "the body is not valid JSON: Input data was truncated. Send a")),
        ("/embed", {"inputs": {"a": 1}}, (422, "Validation", "inputs is invalid: expected `str | array`")),
        ("/embed", {"inputs": ["a", 1]}, (422, "Validation", "inputs mixes token ids with other values")),
        ("/embed", {"inputs": [[101, 40_000]]}, (422, "Validation", "inputs[0][1] is 40000: use 0 to 30521")),
        (
            "/embed",
            {"inputs": "a", "dimensions": 385},
            (422, "Validation", "dimensions is 385: use 1 to 384"),
        ),
        ("/embed", {"inputs": "a", "prompt_name": "q"}, (422, "Validation", "prompt_name is 'q', but the")),
        ("/decode", {"ids": [-1]}, (422, "Validation", "ids[0] is invalid: expected `int` >= 0")),
        ("/decode", {"ids": [[40_000]]}, (422, "Validation", "ids[0][0] is 40000: use 0 to 30521")),
        ("/tokenize", {"inputs": [1]}, (422, "Validation", "inputs[0] is invalid: expected `str`")),
    ],
)
def test_invalid_bodies_are_rejected_by_field(
    path: str, body: Any, expected: tuple[int, str, str], http: HttpClient
) -> None:
    status, kind, message = problem(http, path, body)
    assert (status, kind) == expected[:2]
    assert message.startswith(expected[2])


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (OverloadedError("full", retry_after_s=0.5), 429, "Overloaded"),
        (RequestTooLargeError("too large"), 413, "Validation"),
        (ResponseTooLargeError("the response", 2, 1, "send less"), 422, "Validation"),
        (InputTooLongError("inputs[0]", 300, 256), 422, "Validation"),
        (NotSupportedError("no tokenizer"), 424, "Backend"),
        (NotReadyError("starting"), 503, "Unhealthy"),
        (ShuttingDownError("stopping"), 503, "Unhealthy"),
        (InternalError("1"), 500, "Backend"),
    ],
)
def test_errors_have_the_types_of_tei(error: RequestError, status: int, kind: str) -> None:
    assert DIALECT.status(error) == status
    assert DIALECT.body(error) == {"error": error.message, "error_type": kind}


def test_overload_tells_when_to_retry(stub: StubService) -> None:
    stub.error = OverloadedError("full", retry_after_s=0.5)
    status, headers, value = post(stub, "/embed", {"inputs": "a"})
    assert (status, headers["retry-after"], headers["retry-after-ms"]) == (429, "1", "500")
    assert value == {"error": "full", "error_type": "Overloaded"}


def test_huggingface_client_gets_the_bits_of_grpc(viewer_url: str, minilm_server: ServerProcess) -> None:
    client = InferenceClient(base_url=viewer_url)
    expected = grpc_embeddings(minilm_server.address, TEXTS, normalize=False)
    assert same_bits(client.feature_extraction(TEXTS, normalize=False), expected)
    with Client(minilm_server.address) as grpc_client:
        [encoded] = grpc_client.encode([TEXTS[0]])
    found = client.feature_extraction(TEXTS[0], model=f"{viewer_url}embed_all")
    assert same_bits(found[0], encoded.last_hidden_state)
