"""Every typed exception, raised by a real server."""

from pathlib import Path

import grpc
import pytest

from attnlens_client import (
    AttentionQuery,
    Client,
    DeadlineExceededError,
    InputTooLongError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ResponseTooLargeError,
    UnavailableError,
)
from served import ServerProcess

LONG = "word " * 300


def test_too_long_text_is_reported_with_its_length(client: Client) -> None:
    with pytest.raises(InputTooLongError, match=r"texts\[0\] has 302 tokens.*256.*truncate") as caught:
        client.embed([LONG])
    error = caught.value
    assert (error.num_tokens, error.max_tokens, error.text_index) == (302, 256, 0)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INPUT_TOO_LONG")
    assert isinstance(error.__cause__, grpc.RpcError)
    assert client.embed([LONG], truncate=True).shape == (1, 384)


@pytest.mark.parametrize("method", ["embed", "encode", "encode_stream"])
def test_split_calls_report_the_callers_text_index(minilm_server: ServerProcess, method: str) -> None:
    with (
        Client(minilm_server.address, batch_size=4) as client,
        pytest.raises(InputTooLongError, match=r"^texts\[9\] has") as caught,
    ):
        list(getattr(client, method)(["a"] * 9 + [LONG]))
    assert caught.value.text_index == 9


def test_invalid_field_is_reported(client: Client) -> None:
    for method in (client.encode, client.encode_stream):
        with pytest.raises(InvalidRequestError, match=r"^attention\[0\]\.layers\[1\].*6") as caught:
            list(method(["a"], attention=AttentionQuery(layers=[0, 6])))
        assert [violation.field for violation in caught.value.violations] == ["attention[0].layers[1]"]
        assert caught.value.reason == "INVALID_FIELD"
        assert caught.value.text_index is None
    with pytest.raises(InvalidRequestError, match=r"texts\[0\]\.token_ids"):
        client.embed([[101, 999_999, 102]])


def test_unknown_model_is_reported_with_the_available_models(client: Client) -> None:
    with pytest.raises(ModelNotFoundError, match="nope") as caught:
        client.embed(["a"], model="nope")
    assert caught.value.available == client.get_model().name
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


def test_result_over_the_server_limit_is_reported_with_its_size_and_can_be_streamed(
    minilm_bundle: Path,
) -> None:
    limits = ("--max-response-bytes", "4194304", "--max-text-bytes", "65536")
    with ServerProcess(minilm_bundle, *limits) as server, Client(server.address) as client:
        with pytest.raises(ResponseTooLargeError) as caught:
            client.encode(["word " * 200], attention=AttentionQuery())
        assert caught.value.max_response_bytes == 4194304
        assert caught.value.size_bytes > 6 * 12 * 202 * 202 * 4
        with pytest.raises(InvalidRequestError, match=r"texts\[0\] has 5000000 bytes.*65536"):
            client.embed(["word " * 1_000_000])
        most = client.get_model().limits.max_request_bytes
        with pytest.raises(InvalidRequestError, match=rf"texts\[0\] needs a request of .* limit is {most}:"):
            client.embed([[101] * most])
        with pytest.raises(InvalidRequestError, match="larger than max") as refused:  # gRPC's own message
            client.embed(["a"], model="x" * most)
        assert refused.value.metadata["max_response_bytes"] == str(most)
        [text] = client.encode_stream(["word " * 200], attention=AttentionQuery())
        assert text.weights.shape == (6, 12, 202, 202)


def test_result_over_the_client_limit_raises_the_same_error(minilm_server: ServerProcess) -> None:
    with (
        Client(minilm_server.address, max_response_bytes=10_000, max_attempts=1) as client,
        pytest.raises(ResponseTooLargeError) as caught,
    ):
        client.encode(["word " * 20], attention=AttentionQuery())
    assert caught.value.max_response_bytes == 10_000


def test_no_server_is_unavailable() -> None:
    with Client("127.0.0.1:1", max_attempts=1) as client, pytest.raises(UnavailableError) as caught:
        client.get_model()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == ""


def test_stopped_server_is_unavailable(minilm_bundle: Path) -> None:
    with ServerProcess(minilm_bundle) as server, Client(server.address, max_attempts=1) as client:
        client.embed(["a"])
        server.stop()
        with pytest.raises(UnavailableError):
            client.embed(["a"])


def test_full_queue_is_an_overload_until_it_drains(minilm_bundle: Path) -> None:
    with (
        ServerProcess(
            minilm_bundle, "--max-concurrent-inputs", "1", "--max-inputs-per-request", "1"
        ) as server,
        Client(server.address) as holder,
        Client(server.address, max_attempts=1) as impatient,
        Client(server.address, timeout_s=1) as patient,
    ):
        parts = holder.encode_stream_parts(["word " * 200], attention=AttentionQuery())
        next(parts)  # the rest waits to be read, and the text keeps its queue slot
        with pytest.raises(OverloadedError, match="try again") as caught:
            impatient.encode(["a"], attention=AttentionQuery())
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises((OverloadedError, DeadlineExceededError)):
            patient.encode(["a"], attention=AttentionQuery())
        list(parts)
        assert len(patient.encode(["a"], attention=AttentionQuery())) == 1
