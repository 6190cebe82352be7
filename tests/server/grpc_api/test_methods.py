"""The gRPC methods on a real server with real weights, checked against plain ONNX Runtime."""

from typing import Any

import grpc
import numpy as np
import pytest

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.manifest_pb2 import OUTPUT_ROLE_ATTENTION_WEIGHTS, PRECISION_FP32, ROW_SUM_ONE, Pooling
from attnlens.v1.model_pb2 import MODEL_STATE_READY
from attnlens.v1.tensor_pb2 import DataType
from failures import Failure, read_failure
from references import TEXTS, Reference

ALL = pb.AttentionQuery()


def inputs(*texts: str) -> list[pb.Input]:
    return [pb.Input(text=text) for text in texts]


def fail(call: grpc.UnaryUnaryMultiCallable, request: object) -> Failure:  # type: ignore[type-arg]
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=60)
    return read_failure(caught.value)


# --- Embed ----------------------------------------------------------------------------------------


def test_vectors_are_the_same_alone_and_in_a_batch_of_texts(
    stub: EncoderServiceStub, reference: Reference
) -> None:
    response = stub.Embed(pb.EmbedRequest(inputs=inputs(*TEXTS)))
    vectors = from_tensor(response.embeddings)
    assert vectors.dtype == np.float32
    for vector, text, usage in zip(vectors, TEXTS, response.usages, strict=True):
        hidden = reference(text)["last_hidden_state"].astype(np.float64)
        mean = hidden.mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
        assert (usage.num_tokens, usage.num_tokens_total) == (len(hidden), len(hidden))
        assert not usage.truncated
    assert response.model == "all-MiniLM-L6-v2"
    assert response.model_version == stub.GetModel(pb.GetModelRequest()).model.version
    assert response.timings.compute.ToNanoseconds() > 0
    assert response.timings.tokenize.ToNanoseconds() > 0


@pytest.mark.parametrize("pooling", [Pooling.POOLING_MEAN, Pooling.POOLING_CLS, Pooling.POOLING_MAX])
def test_request_selects_pooling_and_normalization(
    stub: EncoderServiceStub, reference: Reference, pooling: Pooling.ValueType
) -> None:
    request = pb.EmbedRequest(inputs=inputs(TEXTS[0]), pooling=pooling, normalize=False)
    hidden = reference(TEXTS[0])["last_hidden_state"]
    expected = {
        Pooling.POOLING_MEAN: hidden.mean(axis=0),
        Pooling.POOLING_CLS: hidden[0],
        Pooling.POOLING_MAX: hidden.max(axis=0),
    }[pooling]
    np.testing.assert_allclose(from_tensor(stub.Embed(request).embeddings)[0], expected, atol=1e-5)


def test_reduced_dimensions_are_truncated_and_renormalized(stub: EncoderServiceStub) -> None:
    whole = from_tensor(stub.Embed(pb.EmbedRequest(inputs=inputs(TEXTS[0]))).embeddings)[0]
    cut = from_tensor(stub.Embed(pb.EmbedRequest(inputs=inputs(TEXTS[0]), dimensions=64)).embeddings)[0]
    np.testing.assert_allclose(cut, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-6)


def test_float16_is_the_rounded_float32_result(stub: EncoderServiceStub) -> None:
    single = from_tensor(stub.Embed(pb.EmbedRequest(inputs=inputs(*TEXTS))).embeddings)
    request = pb.EmbedRequest(inputs=inputs(*TEXTS), data_type=DataType.DATA_TYPE_FLOAT16)
    half = from_tensor(stub.Embed(request).embeddings)
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, single, atol=5e-4)


def test_token_ids_return_the_vector_of_their_text(stub: EncoderServiceStub) -> None:
    tokens = stub.Tokenize(pb.TokenizeRequest(inputs=inputs(TEXTS[0]))).results[0].tokens
    ids = pb.Input(token_ids=pb.TokenIds(input_ids=[token.id for token in tokens]))
    mixed = pb.EmbedRequest(inputs=[ids, pb.Input(text=TEXTS[0])])
    from_ids, from_text = from_tensor(stub.Embed(mixed).embeddings)
    np.testing.assert_allclose(from_ids, from_text, atol=1e-6)


def test_overlong_text_is_rejected_or_truncated_and_reported(stub: EncoderServiceStub) -> None:
    long = pb.EmbedRequest(inputs=inputs("short", "word " * 300))
    failure = fail(stub.Embed, long)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INPUT_TOO_LONG")
    assert failure.metadata == {"num_tokens": "302", "max_tokens": "256"}
    assert failure.message.startswith("inputs[1] has 302 tokens, but the limit is 256")
    long.truncate = True
    usages = stub.Embed(long).usages
    assert [usage.truncated for usage in usages] == [False, True]
    assert (usages[1].num_tokens, usages[1].num_tokens_total) == (256, 302)


# --- Encode ---------------------------------------------------------------------------------------


def test_every_layer_and_head_matches_the_text_run_alone(
    stub: EncoderServiceStub, reference: Reference
) -> None:
    request = pb.EncodeRequest(inputs=inputs(*TEXTS[:3]), last_hidden_state=True, attention=[ALL])
    response = stub.Encode(request)
    for text, result in zip(TEXTS, response.results, strict=False):
        expected = reference(text)
        [attention] = result.attention
        weights = from_tensor(attention.dense)
        num_tokens = len(result.tokens)
        assert weights.shape == (6, 12, num_tokens, num_tokens)
        assert (list(attention.layers), list(attention.heads)) == ([*range(6)], [*range(12)])
        assert (attention.role, attention.view) == (OUTPUT_ROLE_ATTENTION_WEIGHTS, pb.ATTENTION_VIEW_FULL)
        assert attention.row_sum == ROW_SUM_ONE
        np.testing.assert_allclose(
            from_tensor(result.last_hidden_state), expected["last_hidden_state"], atol=1e-5
        )
        for layer in range(6):
            np.testing.assert_allclose(weights[layer], expected[f"attentions.{layer}"], atol=1e-5)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)


def test_layers_and_heads_keep_the_requested_order(stub: EncoderServiceStub, reference: Reference) -> None:
    query = pb.AttentionQuery(layers=[-1, 0], heads=[3, -12])
    [result] = stub.Encode(pb.EncodeRequest(inputs=inputs(TEXTS[0]), attention=[query])).results
    [attention] = result.attention
    assert (list(attention.layers), list(attention.heads)) == ([5, 0], [3, 0])
    assert not result.HasField("last_hidden_state")
    expected = reference(TEXTS[0])
    stacked = np.stack([expected[f"attentions.{layer}"][[3, 0]] for layer in (5, 0)])
    np.testing.assert_allclose(from_tensor(attention.dense), stacked, atol=1e-5)


def test_queries_of_one_run_are_returned_separately(stub: EncoderServiceStub, reference: Reference) -> None:
    queries = [
        pb.AttentionQuery(layers=[2], heads=[1, 4], view=pb.ATTENTION_VIEW_HEAD_MEAN),
        pb.AttentionQuery(layers=[2, 3]),
        pb.AttentionQuery(layers=[2], heads=[4]),
    ]
    [result] = stub.Encode(pb.EncodeRequest(inputs=inputs(TEXTS[0]), attention=queries)).results
    weights = reference(TEXTS[0])["attentions.2"]
    mean, all_heads, one = (from_tensor(attention.dense) for attention in result.attention)
    assert [attention.query_index for attention in result.attention] == [0, 1, 2]
    assert [list(attention.layers) for attention in result.attention] == [[2], [2, 3], [2]]
    assert (list(result.attention[0].heads), result.attention[0].view) == (
        [1, 4],
        pb.ATTENTION_VIEW_HEAD_MEAN,
    )
    np.testing.assert_allclose(mean[0, 0], weights[[1, 4]].mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(all_heads[0], weights, atol=1e-5)
    np.testing.assert_allclose(one[0], weights[[4]], atol=1e-5)


def test_encode_without_a_query_returns_only_token_vectors(stub: EncoderServiceStub) -> None:
    [result] = stub.Encode(pb.EncodeRequest(inputs=inputs(TEXTS[0]))).results
    assert from_tensor(result.last_hidden_state).shape == (len(result.tokens), 384)
    assert not result.attention


def test_tokens_report_their_position(stub: EncoderServiceStub) -> None:
    [result] = stub.Encode(pb.EncodeRequest(inputs=inputs("Zoë's café"))).results
    cafe = next(token for token in result.tokens if token.text == "cafe")
    assert (cafe.char_start, cafe.char_end, cafe.byte_start, cafe.byte_end) == (6, 10, 7, 12)
    assert result.tokens[0].source == pb.TOKEN_SOURCE_SPECIAL
    assert {token.source for token in result.tokens[1:-1]} == {pb.TOKEN_SOURCE_TEXT}


def test_stream_contains_the_same_data_as_encode(stub: EncoderServiceStub) -> None:
    fields: dict[str, Any] = {
        "inputs": inputs(*TEXTS),
        "last_hidden_state": True,
        "attention": [
            pb.AttentionQuery(layers=[4, 1], heads=[0, 5, 11]),
            pb.AttentionQuery(layers=[1], view=pb.ATTENTION_VIEW_HEAD_MEAN),
        ],
    }
    whole = stub.Encode(pb.EncodeRequest(**fields))
    parts = list(stub.EncodeStream(pb.EncodeStreamRequest(**fields)))
    assert [part.input_index for part in parts] == [index for index in range(len(TEXTS)) for _ in range(4)]
    for index, expected in enumerate(whole.results):
        text, *layers = parts[4 * index : 4 * index + 4]
        assert (text.num_attention_parts, text.model_version) == (3, whole.model_version)
        assert text.text.tokens == expected.tokens
        assert text.text.usage == expected.usage
        np.testing.assert_allclose(
            from_tensor(text.text.last_hidden_state), from_tensor(expected.last_hidden_state), atol=1e-5
        )
        streamed = [part.attention for part in layers]
        assert [(part.query_index, list(part.layers)) for part in streamed] == [(0, [4]), (0, [1]), (1, [1])]
        assert [list(part.heads) for part in streamed] == [[0, 5, 11], [0, 5, 11], [*range(12)]]
        first, mean = expected.attention
        both = np.concatenate([from_tensor(part.dense) for part in streamed[:2]])
        np.testing.assert_allclose(both, from_tensor(first.dense), atol=1e-5)
        np.testing.assert_allclose(from_tensor(streamed[2].dense), from_tensor(mean.dense), atol=1e-5)


def test_response_over_the_message_limit_is_rejected_before_it_is_computed(
    stub: EncoderServiceStub,
) -> None:
    fields: dict[str, Any] = {"inputs": inputs("word " * 240, "word " * 240), "attention": [ALL]}
    request = pb.EncodeRequest(**fields)
    failure = fail(stub.Encode, request)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "RESPONSE_TOO_LARGE")
    assert failure.metadata["max_response_bytes"] == str(32 << 20)
    size = int(failure.metadata["size_bytes"])
    parts = stub.EncodeStream(pb.EncodeStreamRequest(**fields))
    sent = sum(part.ByteSize() for part in parts)
    assert sent == pytest.approx(size, rel=0.01)
    assert "EncodeStream" in failure.message
    assert str(size) in failure.message


# --- Tokenize, models -----------------------------------------------------------------------------


def test_tokenize_returns_all_tokens_and_reports_overlong_texts(stub: EncoderServiceStub) -> None:
    short, long = stub.Tokenize(pb.TokenizeRequest(inputs=inputs("a cat", "word " * 300))).results
    assert [token.text for token in short.tokens] == ["[CLS]", "a", "cat", "[SEP]"]
    assert (short.exceeds_max_tokens, long.exceeds_max_tokens) == (False, True)
    assert len(long.tokens) == 302


def test_model_info_is_complete(stub: EncoderServiceStub) -> None:
    [model] = stub.ListModels(pb.ListModelsRequest()).models
    assert stub.GetModel(pb.GetModelRequest(model="all-MiniLM-L6-v2")).model == model
    sizes = model.architecture
    assert (sizes.hidden_size, sizes.num_layers, sizes.num_heads, sizes.vocab_size) == (384, 6, 12, 30522)
    assert (model.state, model.supports_text_pairs, model.precision) == (
        MODEL_STATE_READY,
        True,
        PRECISION_FP32,
    )
    assert [output.role for output in model.outputs] == [1] + 6 * [OUTPUT_ROLE_ATTENTION_WEIGHTS]
    assert len(model.version) == 64
    assert model.limits.max_attention_queries == 16
    assert (model.max_tokens, model.pooling.pooling, model.pooling.normalize) == (256, 1, True)
    assert list(model.execution_providers) == ["CPUExecutionProvider"]
    assert model.parity.passed
    assert 0 < max(figure.max_abs_error for figure in model.parity.figures) <= 2e-5
    assert model.limits.max_batch_tokens == 256
    assert {"attnlens", "onnxruntime", "export/torch", "export/onnx"} <= set(model.versions)


# --- rejected requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "violations"),
    [
        (pb.EmbedRequest(), {"inputs": "is empty: send at least one text"}),
        (pb.EmbedRequest(inputs=[pb.Input()]), {"inputs[0]": "is empty: set text, text_pair or token_ids"}),
        (
            pb.EmbedRequest(inputs=[pb.Input(token_ids=pb.TokenIds(input_ids=[101, 30522]))]),
            {"inputs[0].token_ids.input_ids[1]": "is 30522: use 0 to 30521"},
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(token_ids=pb.TokenIds())]),
            {"inputs[0].token_ids.input_ids": "is empty: send at least one id"},
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(text="a")] * 2049),
            {"inputs": "has 2049 texts, but the limit is 2048: send several requests"},
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(text="é" * (1 << 16) + "a")]),
            {"inputs[0].text": "has 131073 bytes, but the limit is 131072: split the text"},
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(text="a")], dimensions=385, data_type=3),  # type: ignore[arg-type]
            {
                "dimensions": "is 385: use 1 to 384, or 0 for all",
                "data_type": "is 3: use one of DATA_TYPE_FLOAT32, DATA_TYPE_FLOAT16",
            },
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(text="a " * 30_000)] * 70),
            {"inputs": "has 4200000 bytes of text, but the limit is 4194304: send several requests"},
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(token_ids=pb.TokenIds(input_ids=[1] * 200_000))]),
            {"inputs[0].token_ids.input_ids": "has 200000 ids, but the limit is 131072: split the input"},
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(text="a")], pooling=7),  # type: ignore[arg-type]
            {
                "pooling": "is 7: use one of POOLING_MEAN, POOLING_CLS, POOLING_MAX, POOLING_LAST_TOKEN, "
                "POOLING_WEIGHTED_MEAN, POOLING_MEAN_SQRT_LENGTH"
            },
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(text="a")], prompt=pb.Prompt(name="query")),
            {
                "prompt.name": "is 'query', but the model has no prompts: use another name, or send the text",
            },
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(text="a " * 50_000)], prompt=pb.Prompt(text="b " * 20_000)),
            {
                "inputs[0].text": "has 140000 bytes with the prompt, but the limit is 131072: split the text",
            },
        ),
        (
            pb.EmbedRequest(inputs=[pb.Input(text="a")] * 100, prompt=pb.Prompt(text="b " * 30_000)),
            {
                "inputs": "has 6000100 bytes of text with the prompt, but the limit is 4194304: "
                "send several requests"
            },
        ),
        (
            pb.EmbedRequest(
                inputs=[pb.Input(token_ids=pb.TokenIds(input_ids=[1]))], prompt=pb.Prompt(text="a")
            ),
            {
                "inputs[0].token_ids": "cannot be combined with a prompt: send text, or omit the prompt",
            },
        ),
    ],
)
def test_invalid_embed_field_is_reported_by_name(
    stub: EncoderServiceStub, request_: pb.EmbedRequest, violations: dict[str, str]
) -> None:
    failure = fail(stub.Embed, request_)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failure.violations == violations


def test_every_invalid_encode_field_is_reported_by_name(stub: EncoderServiceStub) -> None:
    fields: dict[str, Any] = {
        "inputs": inputs("a"),
        "attention": [pb.AttentionQuery(layers=[6, 0, -6], heads=[-13], view=5), pb.AttentionQuery(role=5)],  # type: ignore[arg-type]
    }  # fmt: skip
    expected = {
        "attention[0].view": "is 5: use one of ATTENTION_VIEW_FULL, ATTENTION_VIEW_HEAD_MEAN, "
        "ATTENTION_VIEW_DENSE",
        "attention[0].layers[0]": "is 6, but the model has 6: use 0 to 5, or -6 to -1",
        "attention[0].layers[2]": "is -6, which is listed twice: remove it",
        "attention[0].heads[0]": "is -13, but the model has 12: use 0 to 11, or -12 to -1",
        "attention[1].role": "is OUTPUT_ROLE_HEAD_GATES: the model has OUTPUT_ROLE_ATTENTION_WEIGHTS",
    }
    assert fail(stub.Encode, pb.EncodeRequest(**fields)).violations == expected
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.EncodeStream(pb.EncodeStreamRequest(**fields)))
    assert read_failure(caught.value).violations == expected


def test_overlong_list_of_layers_is_not_read_completely(stub: EncoderServiceStub) -> None:
    query = pb.AttentionQuery(layers=[0] * 500_000)
    assert fail(stub.Encode, pb.EncodeRequest(inputs=inputs("a"), attention=[query])).violations == {
        "attention[0].layers": "has more than 6 numbers, the number in the model: list each once"
    }


@pytest.mark.parametrize("model", ["a\nb", "a\tb", "a\0b", "naïve 😀", "x" * 10_000])
def test_model_name_with_any_characters_is_rejected(stub: EncoderServiceStub, model: str) -> None:
    failure = fail(stub.Embed, pb.EmbedRequest(model=model, inputs=inputs("a")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


def test_unknown_model_is_reported_with_the_available_one(stub: EncoderServiceStub) -> None:
    for call, request in (
        (stub.Embed, pb.EmbedRequest(model="bert", inputs=inputs("a"))),
        (stub.Encode, pb.EncodeRequest(model="bert", inputs=inputs("a"))),
        (stub.Tokenize, pb.TokenizeRequest(model="bert", inputs=inputs("a"))),
        (stub.GetModel, pb.GetModelRequest(model="bert")),
    ):
        failure = fail(call, request)
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert failure.metadata == {"model": "bert", "available": "all-MiniLM-L6-v2"}


MODEL_REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Embed": (pb.EmbedRequest, {"inputs": inputs("a")}),
    "Encode": (pb.EncodeRequest, {"inputs": inputs("a")}),
    "EncodeStream": (pb.EncodeStreamRequest, {"inputs": inputs("a")}),
    "Tokenize": (pb.TokenizeRequest, {"inputs": inputs("a")}),
    "GetModel": (pb.GetModelRequest, {}),
    "Explain": (pb.ExplainRequest, {"inputs": inputs("a")}),
    "Compare": (
        pb.CompareRequest,
        {"pairs": [pb.ComparedPair(a=pb.Input(text="a"), b=pb.Input(text="b"))]},
    ),
}


def call_method(stub: EncoderServiceStub, method: str, **fields: str) -> None:
    make_request, inputs_field = MODEL_REQUESTS[method]
    result = getattr(stub, method)(make_request(**inputs_field, **fields), timeout=60)
    if method == "EncodeStream":
        list(result)


def test_every_method_except_list_models_accepts_a_model_and_a_version() -> None:
    with_version = {
        method.name
        for method in pb.DESCRIPTOR.services_by_name["EncoderService"].methods
        if {"model", "model_version"} <= set(method.input_type.fields_by_name)
    }
    all_methods = {method.name for method in pb.DESCRIPTOR.services_by_name["EncoderService"].methods}
    of_classifiers = {"Score", "Classify"}  # tests/server/test_classifiers.py
    assert with_version == {*MODEL_REQUESTS} | of_classifiers == all_methods - {"ListModels"}


@pytest.mark.parametrize("method", MODEL_REQUESTS)
def test_request_is_served_only_by_the_requested_version(stub: EncoderServiceStub, method: str) -> None:
    model = stub.GetModel(pb.GetModelRequest()).model
    for name in ("", model.name):
        call_method(stub, method, model=name, model_version=model.version)
    for version in ("0" * 64, model.version[:12], model.version.upper(), "x" * 10_000, "a\nb"):
        with pytest.raises(grpc.RpcError) as caught:
            call_method(stub, method, model_version=version)
        failure = read_failure(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert failure.metadata["available"] == failure.metadata["model"] == model.name
        assert failure.metadata["available_version"] == model.version
        assert version.startswith(failure.metadata["model_version"][:40])
    with pytest.raises(grpc.RpcError) as caught:
        call_method(stub, method, model="bert", model_version=model.version)
    assert read_failure(caught.value).metadata == {"model": "bert", "available": model.name}


def test_only_model_is_the_default_model(stub: EncoderServiceStub) -> None:
    assert [model.is_default for model in stub.ListModels(pb.ListModelsRequest()).models] == [True]
    assert stub.GetModel(pb.GetModelRequest()).model.is_default
