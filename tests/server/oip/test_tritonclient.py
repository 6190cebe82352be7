"""NVIDIA's tritonclient against a real server, compared with `attnlens.v1.EncoderService`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.manifest_pb2 import POOLING_MAX
from references import TEXTS
from served import ServerProcess

NAME = "all-MiniLM-L6-v2"
ATTENTIONS = [f"attentions.{layer}" for layer in range(6)]
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def client(minilm_server: ServerProcess) -> Iterator[Any]:
    with triton.InferenceServerClient(minilm_server.address) as opened:
        yield opened


def tensor(name: str, values: Array) -> Any:
    kinds = {"O": "BYTES", "i8": "INT64", "i4": "INT32"}
    datatype = kinds["O" if values.dtype == object else values.dtype.str[1:]]
    made = triton.InferInput(name, values.shape, datatype)
    made.set_data_from_numpy(values)
    return made


def text(*texts: str) -> Any:
    return tensor("text", np.array(texts, object))


def outputs(*names: str) -> list[Any]:
    return [triton.InferRequestedOutput(name) for name in names]


def inputs(texts: Sequence[str]) -> list[pb.Input]:
    return [pb.Input(text=each) for each in texts]


def padded_ids(stub: EncoderServiceStub, dtype: type = np.int64) -> tuple[Array, Array]:
    """Return the ids and the mask of all TEXTS."""
    texts = stub.Tokenize(pb.TokenizeRequest(inputs=inputs(TEXTS))).results
    width = max(len(each.tokens) for each in texts) + 3
    ids: Array = np.full((len(texts), width), 7, dtype)
    mask: Array = np.zeros_like(ids)
    for row, each in enumerate(texts):
        ids[row, : len(each.tokens)] = [token.id for token in each.tokens]
        mask[row, : len(each.tokens)] = 1
    return ids, mask


def test_server_and_models_are_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    assert client.is_model_ready(f"{NAME}_tokens", "1")
    assert not client.is_model_ready(NAME, "2")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "attnlens"
    names = [model.name for model in client.get_model_repository_index().models]
    assert names == [NAME, f"{NAME}_tokens", f"{NAME}_attentions"]


@pytest.mark.parametrize(
    ("name", "declared_inputs", "declared_outputs"),
    [
        (NAME, {"text": ("BYTES", [-1])}, {"sentence_embedding": ("FP32", [-1, 384])}),
        (
            f"{NAME}_tokens",
            {"input_ids": ("INT64", [-1, -1]), "attention_mask": ("INT64", [-1, -1])},
            {"last_hidden_state": ("FP32", [-1, -1, 384])},
        ),
        (
            f"{NAME}_attentions",
            {"input_ids": ("INT64", [-1, -1]), "attention_mask": ("INT64", [-1, -1])},
            {"last_hidden_state": ("FP32", [-1, -1, 384])}
            | dict.fromkeys(ATTENTIONS, ("FP32", [-1, 12, -1, -1])),
        ),
    ],
)
def test_metadata_declares_what_a_request_needs_and_returns(
    client: Any, name: str, declared_inputs: dict[str, Any], declared_outputs: dict[str, Any]
) -> None:
    metadata = client.get_model_metadata(name)
    assert (metadata.name, list(metadata.versions)) == (name, ["1"])
    for tensors, declared in ((metadata.inputs, declared_inputs), (metadata.outputs, declared_outputs)):
        assert {each.name: (each.datatype, list(each.shape)) for each in tensors} == declared
    assert client.get_model_config(name).config.name == name


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("name", ["text", "TEXT0"])
def test_texts_return_the_embeddings_of_embed(
    client: Any, stub: EncoderServiceStub, shape: tuple[int, ...], name: str
) -> None:
    texts = np.array(TEXTS, object).reshape(shape)
    result = client.infer(NAME, [tensor(name, texts)], request_id="a-17", model_version="1")
    expected = from_tensor(stub.Embed(pb.EmbedRequest(inputs=inputs(TEXTS))).embeddings)
    np.testing.assert_array_equal(result.as_numpy("sentence_embedding"), expected, strict=True)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == (NAME, "1", "a-17")


def test_parameters_are_those_of_embed(client: Any, stub: EncoderServiceStub) -> None:
    texts = [TEXTS[0], "word " * 400]
    parameters = {"truncate": True, "normalize": False, "dimensions": 100, "pooling": "max", "triton_x": 1}
    result = client.infer(
        NAME,
        [text(*texts)],
        outputs=outputs("embedding"),
        parameters=parameters,
        priority=2,
        timeout=60_000_000,
    )
    request = pb.EmbedRequest(
        inputs=inputs(texts), truncate=True, normalize=False, dimensions=100, pooling=POOLING_MAX
    )
    np.testing.assert_array_equal(result.as_numpy("embedding"), from_tensor(stub.Embed(request).embeddings))
    assert result.get_response().parameters["num_truncated"].int64_param == 1


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_token_ids_return_padded_results_of_encode(
    client: Any, stub: EncoderServiceStub, dtype: type
) -> None:
    ids, mask = padded_ids(stub, dtype)
    tensors = [tensor("input_ids", ids), tensor("attention_mask", mask), tensor("token_type_ids", 0 * ids)]
    names = ["attentions.4", "last_hidden_state", "attentions.1", "sentence_embedding"]
    result = client.infer(f"{NAME}_tokens", tensors, outputs=outputs(*names))
    rows = [row[: length.sum()] for row, length in zip(ids, mask, strict=True)]
    given = [pb.Input(token_ids=pb.TokenIds(input_ids=row)) for row in rows]
    queries = [pb.AttentionQuery(layers=[4, 1])]
    request = pb.EncodeRequest(inputs=given, last_hidden_state=True, attention=queries)
    vectors, batch = result.as_numpy("last_hidden_state"), (len(ids), ids.shape[1])
    assert vectors.shape == (*batch, 384)
    for index, expected in enumerate(stub.Encode(request).results):
        size = len(expected.tokens)
        np.testing.assert_array_equal(vectors[index, :size], from_tensor(expected.last_hidden_state))
        assert not vectors[index, size:].any()
        for name, weights in zip(
            ("attentions.4", "attentions.1"), from_tensor(expected.attention[0].dense), strict=True
        ):
            padded = result.as_numpy(name)[index]
            assert padded.shape == (12, batch[1], batch[1])
            np.testing.assert_array_equal(padded[:, :size, :size], weights)
            assert not padded[:, size:].any()
            assert not padded[:, :, size:].any()
    embeddings = from_tensor(stub.Embed(pb.EmbedRequest(inputs=given)).embeddings)
    np.testing.assert_array_equal(result.as_numpy("sentence_embedding"), embeddings)


def test_default_outputs_of_token_ids_are_those_of_the_metadata(client: Any) -> None:
    tensors = [tensor(name, np.array([[101, 102]])) for name in ("input_ids", "attention_mask")]
    tensors[1].set_data_from_numpy(np.ones((1, 2), np.int64))
    names = {
        name: [each.name for each in client.infer(name, tensors).get_response().outputs]
        for name in (NAME, f"{NAME}_tokens", f"{NAME}_attentions")
    }
    assert names == {
        NAME: ["last_hidden_state"],
        f"{NAME}_tokens": ["last_hidden_state"],
        f"{NAME}_attentions": ["last_hidden_state", *ATTENTIONS],
    }


def test_texts_return_contributions_and_their_mask(client: Any, stub: EncoderServiceStub) -> None:
    texts = [TEXTS[0], TEXTS[4]]
    names = ("contributions", "attention_mask", "last_hidden_state")
    result = client.infer(NAME, [text(*texts)], outputs=outputs(*names))
    explained = stub.Explain(pb.ExplainRequest(inputs=inputs(texts))).results
    encoded = stub.Encode(pb.EncodeRequest(inputs=inputs(texts), last_hidden_state=True)).results
    lengths = [len(each.tokens) for each in explained]
    assert lengths[0] > lengths[1]
    mask = np.arange(lengths[0]) < np.array(lengths)[:, None]
    np.testing.assert_array_equal(result.as_numpy("attention_mask"), mask.astype(np.int64), strict=True)
    for name, expected in (
        ("contributions", [from_tensor(each.scores[0].values) for each in explained]),
        ("last_hidden_state", [from_tensor(each.last_hidden_state) for each in encoded]),
    ):
        values = result.as_numpy(name)
        np.testing.assert_array_equal(values[mask], np.concatenate(expected))
        assert not values[~mask].any()
    alone = client.infer(NAME, [text(*texts)], outputs=outputs("attention_mask"))
    np.testing.assert_array_equal(alone.as_numpy("attention_mask"), mask)


LONG = "word " * 300
IDS = np.array([[101, 2009, 102]])
MASK = np.ones_like(IDS)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ({"model_name": "other"}, "NOT_FOUND", f"the model 'other' is not loaded: use '{NAME}'"),
        ({"model_version": "2"}, "NOT_FOUND", f"version '2' of the model '{NAME}' is not loaded: use '1'"),
        ({"outputs": outputs("logits")}, "INVALID_ARGUMENT", "outputs[0].name is 'logits': use sentence_emb"),
        ({"outputs": outputs("embedding", "embedding")}, "INVALID_ARGUMENT", "which is listed twice"),
        ({"outputs": [triton.InferRequestedOutput("embedding", 3)]}, "INVALID_ARGUMENT", "'classification'"),
        ({"parameters": {"trunc": True}}, "INVALID_ARGUMENT", "use truncate, prompt_name, timeout, pooling"),
        ({"parameters": {"truncate": "yes"}}, "INVALID_ARGUMENT", "truncate is string_param: use bool_param"),
        ({"parameters": {"dimensions": 999}}, "INVALID_ARGUMENT", "dimensions is 999: use 1 to 384"),
        ({"parameters": {"pooling": "sum"}}, "INVALID_ARGUMENT", "pooling is 'sum': use one of mean, cls"),
        (
            {"parameters": {"prompt_name": "q"}},
            "INVALID_ARGUMENT",
            "prompt_name is 'q', but the model has no",
        ),
        (
            {"parameters": {"normalize": True}, "outputs": outputs("last_hidden_state")},
            "INVALID_ARGUMENT",
            "'normalize', which is not known: for these outputs, use truncate, prompt_name, timeout",
        ),
        ({"inputs": [text("ok", LONG)]}, "INVALID_ARGUMENT", "text[1] has 302 tokens, but the limit is 256"),
        ({"inputs": [text("x" * 200_000)]}, "INVALID_ARGUMENT", "text[0] has 200000 bytes, but the limit is"),
        ({"inputs": [text(*["x"] * 2049)]}, "INVALID_ARGUMENT", "text is BYTES [2049]: send 1 to 2048 texts"),
        ({"inputs": [text("a"), tensor("b", IDS)]}, "INVALID_ARGUMENT", "inputs has 'text', 'b': use text"),
        ({"inputs": [tensor("input_ids", IDS)]}, "INVALID_ARGUMENT", "inputs has 'input_ids': use text"),
        (
            {"inputs": [tensor("input_ids", 9**6 * IDS), tensor("attention_mask", MASK)]},
            "INVALID_ARGUMENT",
            f"input_ids[0][0] is {101 * 9**6}: use 0 to 30521",
        ),
        (
            {"inputs": [tensor("input_ids", IDS), tensor("attention_mask", IDS)]},
            "INVALID_ARGUMENT",
            "attention_mask[0] does not consist of ones followed by zeros",
        ),
        (
            {"inputs": [tensor("input_ids", IDS), tensor("attention_mask", MASK[:, :2])]},
            "INVALID_ARGUMENT",
            "attention_mask has the shape [1, 2], but input_ids has [1, 3]",
        ),
        (
            {"inputs": [tensor("input_ids", IDS), tensor("attention_mask", 0 * MASK)]},
            "INVALID_ARGUMENT",
            "input_ids[0] is empty",
        ),
        ({"model_name": f"{NAME}_tokens"}, "INVALID_ARGUMENT", "inputs has a BYTES tensor: use input_ids"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_name_the_field_and_the_limit(
    client: Any, arguments: dict[str, Any], status: str, message: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(**{"model_name": NAME, "inputs": [text("A text.")]} | arguments)
    assert caught.value.status() == f"StatusCode.{status}"
    assert message in caught.value.message()


def test_shared_memory_is_rejected(client: Any) -> None:
    given = triton.InferInput("text", [1], "BYTES")
    given.set_shared_memory("region", 10)
    with pytest.raises(InferenceServerException, match=r"inputs\[0\]\.parameters has 'shared_memory_"):
        client.infer(NAME, [given])


def test_padding_counts_towards_the_response_limit(client: Any) -> None:
    """511 short texts are padded to the length of one long text."""
    texts = text("word " * 250, *["a"] * 511)
    with pytest.raises(InferenceServerException, match="the padded response would be 198180864 bytes"):
        client.infer(NAME, [texts], outputs=outputs("last_hidden_state"))


def test_timeout_in_microseconds_is_a_deadline(client: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer(NAME, [text(*["word " * 250] * 64)], timeout=1000)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_other_methods_are_unimplemented(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="Method not found"):
        client.get_inference_statistics()
