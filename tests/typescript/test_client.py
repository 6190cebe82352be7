"""The TypeScript client calls a server from Node.js and, across origins, from Chromium."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import error_pb2, tensor_pb2
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client import Client
from typescript.conftest import Run, Server, opened_in, run_in_node

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.extended

TEXTS = ["A man is playing a guitar.", "", "Füße 東京 😀"]
LONG = ["word " * 250] * 3
QUERY = {"layers": [1], "reduction": {"top_k": {"k": 2}}}


def outcomes(run: Run, server: Server, *calls: list[Any], **options: Any) -> list[Any]:
    """Return the values of calls."""
    results = run("calls", {"baseUrl": server.url, **options}, list(calls))
    assert all("value" in result for result in results), results
    return [result["value"] for result in results]


def errors(run: Run, server: Server, *calls: list[Any], **options: Any) -> list[Any]:
    """Return the errors of calls."""
    results = run("calls", {"baseUrl": server.url, **options}, list(calls))
    assert all(result["error"]["isBase"] for result in results)
    return [result["error"] for result in results]


def array(tensor: tensor_pb2.Tensor, kind: str = "Float32Array") -> dict[str, Any]:
    """Return a tensor as scenarios.mjs returns it."""
    return {"shape": list(tensor.shape), "type": kind, "hex": tensor.data.hex()}


def test_embeddings_equal_those_of_the_python_client(run: Run, server: Server) -> None:
    full, one, half, binary = outcomes(
        run,
        server,
        ["embed", TEXTS],
        ["embed", TEXTS[0], {"dimensions": 5, "pooling": "max"}],
        ["embed", TEXTS, {"data_type": "float16"}],
        ["embed", TEXTS, {"embedding_type": "ubinary"}],
    )
    with Client(server.process.address) as client:
        expected = np.asarray(client.embed(TEXTS))
        short = np.asarray(client.embed(TEXTS[:1], dimensions=5, pooling="max"))
    assert full["embeddings"] == [{"type": "Float32Array", "hex": row.tobytes().hex()} for row in expected]
    assert [row["hex"] for row in one["embeddings"]] == [short[0].tobytes().hex()]
    rounded = expected.astype(np.float16).astype(np.float32)
    assert [row["hex"] for row in half["embeddings"]] == [row.tobytes().hex() for row in rounded]
    bits = np.packbits(expected > 0, axis=1)
    assert binary["embeddings"] == [{"type": "Uint8Array", "hex": row.tobytes().hex()} for row in bits]
    assert [usage["num_tokens"] for usage in full["usages"]][1] == 2


def test_other_methods_return_what_grpc_returns(run: Run, server: Server) -> None:
    pair = {"a": TEXTS[0], "b": TEXTS[2]}
    encoded, attention, tokens, explained, compared, models = outcomes(
        run,
        server,
        ["encode", TEXTS[0], {"last_hidden_state": True, "attention": [QUERY]}],
        ["attention", TEXTS[:1]],
        ["tokenize", TEXTS[2]],
        ["explain", TEXTS[:1], {"to": TEXTS[2]}],
        ["compare", pair],
        ["models"],
    )
    first, last = pb.Input(text=TEXTS[0]), pb.Input(text=TEXTS[2])
    query = pb.AttentionQuery(layers=[1], reduction=pb.AttentionReduction(top_k=pb.TopK(k=2)))
    with grpc.insecure_channel(server.process.address) as channel:
        stub = EncoderServiceStub(channel)
        encoding = stub.Encode(pb.EncodeRequest(inputs=[first], last_hidden_state=True, attention=[query]))
        weights = stub.Encode(pb.EncodeRequest(inputs=[first], attention=[pb.AttentionQuery()]))
        spans = stub.Tokenize(pb.TokenizeRequest(inputs=[last]))
        explanation = stub.Explain(pb.ExplainRequest(inputs=[first], to=last))
        comparison = stub.Compare(pb.CompareRequest(pairs=[pb.ComparedPair(a=first, b=last)]))
    [result], [expected] = encoded["results"], encoding.results
    assert result["last_hidden_state"] == array(expected.last_hidden_state)
    found, top = result["attention"][0]["top_k"], expected.attention[0].top_k
    assert found["indices"] == array(top.indices, "Int32Array")
    assert found["values"] == array(top.values)
    layers = attention["results"][0]["attention"]
    assert [layer["dense"] for layer in layers] == [
        array(each.dense) for each in weights.results[0].attention
    ]
    assert [token["id"] for token in tokens["results"][0]["tokens"]] == [
        token.id for token in spans.results[0].tokens
    ]
    assert explained["results"][0]["scores"][0]["values"] == array(explanation.results[0].scores[0].values)
    assert compared["results"][0]["similarity"] == pytest.approx(comparison.results[0].similarity, abs=1e-7)
    assert [model["name"] for model in models] == ["all-MiniLM-L6-v2"]


def test_stream_yields_the_parts_of_encode(run: Run, server: Server) -> None:
    options = {"attention": [{"layers": [0, 1]}]}
    parts, encoded = outcomes(run, server, ["encodeStream", TEXTS, options], ["encode", TEXTS, options])
    assert [part["input_index"] for part in parts] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    weights = [part["attention"]["dense"]["hex"] for part in parts if "attention" in part]
    expected = [result["attention"][0]["dense"]["hex"] for result in encoded["results"]]
    assert ["".join(weights[start : start + 2]) for start in (0, 2, 4)] == expected  # the second has 2 layers


@pytest.mark.parametrize("scenario", ["leftStream", "abortedStream"])
def test_server_cancels_a_stream_that_is_not_read_to_its_end(
    run: Run, server: Server, scenario: str, request: pytest.FixtureRequest
) -> None:
    request_id = request.node.callspec.id
    options = {"baseUrl": server.url, "headers": {"X-Request-Id": request_id}}
    assert run(scenario, options, LONG) == {"leftStream": 0, "abortedStream": "AbortError"}[scenario]
    assert server.status(request_id) == "CANCELLED"


def test_errors_have_the_class_of_their_reason(run: Run, server: Server) -> None:
    too_long, unknown, invalid, stream = errors(
        run,
        server,
        ["embed", ["a", "word " * 400]],
        ["embed", "a", {"model": "other"}],
        ["explain", "a", {"direction": [1]}],
        ["encodeStream", "a", {"attention": [{"layers": [9]}]}],
        headers={"X-Request-Id": "r-1"},
    )
    assert (too_long["name"], too_long["status"]) == ("InputTooLongError", 400)
    assert too_long["metadata"] == {"num_tokens": "402", "max_tokens": "256"}
    assert too_long["violations"][0]["field"].startswith("inputs[1]")
    assert too_long["message"].startswith("inputs[1]")
    assert too_long["requestId"] == "r-1"
    assert (unknown["name"], unknown["status"]) == ("ModelNotFoundError", 404)
    assert unknown["metadata"]["available"] == "all-MiniLM-L6-v2"
    assert (invalid["name"], invalid["violations"][0]["field"]) == ("InvalidFieldError", "direction")
    assert (stream["name"], stream["status"]) == ("InvalidFieldError", 400)


def test_overloaded_server_is_called_again(run: Run, server: Server) -> None:
    result = run("overloaded", {"baseUrl": server.url}, LONG)
    error = result["error"]
    assert (error["name"], error["status"]) == ("OverloadedError", 429)
    assert error["retryAfterMs"] > 0
    assert result["count"] >= 2
    assert result["numLayers"] == 6


def test_pages_of_unknown_origins_get_no_response(browser: "Browser", server: Server) -> None:
    with opened_in(browser, server.origin.replace("127.0.0.1", "localhost")) as run:
        [error] = errors(run, server, ["embed", "a"], maxRetries=0)
    assert error["name"] == "ConnectionError"


def test_headers_that_control_retries_are_readable_across_origins(server: Server) -> None:
    request = Request(f"{server.url}healthz", headers={"Origin": server.origin})
    with urlopen(request) as response:
        exposed = set(response.headers["Access-Control-Expose-Headers"].split(", "))
    assert exposed == {
        "Retry-After", "Retry-After-Ms", "X-Request-Id", "X-Should-Retry", "X-Truncated-Inputs",
    }  # fmt: skip


def test_there_is_a_class_for_each_reason(node_modules: Path) -> None:
    assert node_modules.exists()
    names = {
        name.removeprefix("ERROR_REASON_") for name, number in error_pb2.ErrorReason.items() if number != 0
    }
    assert run_in_node("classes") == {name: f"{name.title().replace('_', '')}Error" for name in names}


def test_behavior_without_a_server(node_modules: Path) -> None:
    assert node_modules.exists()
    tests = Path(__file__).parent / "client.test.mjs"
    result = subprocess.run(
        ["node", "--test", "--test-reporter", "spec", tests], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
