"""Classifiers and rerankers: in process and from a server, compared with sentence-transformers."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import attnlens_server
from attnlens.classifiers import ScoreActivation
from attnlens.oip import open_inference_pb2 as oip
from attnlens.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attnlens_cli.app import run
from attnlens_client import (
    Client,
    InputTooLongError,
    NotSupportedError,
    Text,
    TokenIds,
)
from attnlens_server import Local, ServerConfig, errors
from attnlens_server.core.admission import Budget, Reservation
from attnlens_server.core.process import State
from attnlens_server.operations.classify import ClassifyRequest
from attnlens_server.operations.documents import ScoreRequest
from attnlens_server.operations.score import ScoreOperation, ScorePlan, scores
from attnlens_server.served_model import ServedModel
from attnlens_server.text import Input
from model_services import plans_of
from pages.blocks import blocks_of
from schemas import conforms
from served import ServerProcess
from toy_models import make_model

QUERY = "the man"
DOCUMENTS = ["a café in the sea", "the man", "", "it was wet and it rained", "the man", "東京 😀"]
LONG = "the man and the sea " * 20  # the small models have 34 positions
ATOL = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module", params=["reranker", "byte-level reranker"])
def reranker(
    request: pytest.FixtureRequest, classifier_bundle: Callable[[str], Path]
) -> Iterator[tuple[Local, Path]]:
    bundle = classifier_bundle(request.param)
    with attnlens_server.local(bundle, threads=1) as model:
        yield model, bundle.parent / "source"


@pytest.fixture(scope="module")
def topics(classifier_bundle: Callable[[str], Path]) -> Iterator[tuple[Local, Path]]:
    bundle = classifier_bundle("topics")
    with attnlens_server.local(bundle, threads=1) as model:
        yield model, bundle.parent / "source"


@pytest.fixture(scope="module")
def served(classifier_bundle: Callable[[str], Path]) -> Iterator[ServedModel]:
    model = ServedModel(
        ServerConfig(
            bundle=classifier_bundle("reranker"),
            threads=1,
            max_concurrent_inputs=40,
            max_inputs_per_request=40,
        )
    )
    model.engine.start(model.max_tokens)
    model.service.process.state = State.SERVING
    yield model
    model.engine.close()
    model.service.process.workers.close()


def budget(served: ServedModel, deadline: float | None = None) -> Budget:
    return Budget(Reservation(served.service.process.admission), deadline)


def documents(*texts: str, **options: Any) -> ScoreRequest:
    return ScoreRequest(query=QUERY, inputs=[Input(text=text) for text in texts], **options)


def logits_of(source: Path, *texts: Any, **options: Any) -> np.ndarray:
    """Return the logits (C,) of transformers for a text or pair."""
    model = AutoModelForSequenceClassification.from_pretrained(source).eval()
    with torch.no_grad():
        encoded = AutoTokenizer.from_pretrained(source)(*texts, return_tensors="pt", **options)
        return np.asarray(model(**encoded).logits[0].numpy())


# --- Results --------------------------------------------------------------------------------------


def test_scores_equal_cross_encoder(reranker: tuple[Local, Path]) -> None:
    model, source = reranker
    oracle = CrossEncoder(str(source), device="cpu")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    result = model.score(QUERY, DOCUMENTS)
    logits = oracle.predict(pairs, activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(result.logits, logits, atol=ATOL)
    np.testing.assert_allclose(result.scores, oracle.predict(pairs), atol=ATOL)
    assert result.activation == "sigmoid"
    np.testing.assert_array_equal(model.score_pairs(pairs).logits, result.logits)
    np.testing.assert_array_equal(model.score(QUERY, DOCUMENTS, activation="identity").scores, result.logits)
    ranked = model.rerank(QUERY, DOCUMENTS, top_n=5)
    assert [each.index for each in ranked] == [
        each["corpus_id"] for each in oracle.rank(QUERY, DOCUMENTS)[:5]
    ]
    assert [each.document for each in ranked] == [DOCUMENTS[each.index] for each in ranked]


def test_documents_with_equal_logits_stay_in_order(reranker: tuple[Local, Path]) -> None:
    model, _ = reranker
    ranked = model.rerank(QUERY, ["b", "a", "b", "a", "b"])
    assert [each.index for each in ranked] in ([0, 2, 4, 1, 3], [1, 3, 0, 2, 4])


def test_scores_do_not_depend_on_other_documents(reranker: tuple[Local, Path]) -> None:
    model, _ = reranker
    together = model.score(QUERY, DOCUMENTS).logits
    reverse = model.score(QUERY, DOCUMENTS[::-1]).logits[::-1]
    alone = [model.score(QUERY, [document]).logits[0] for document in DOCUMENTS]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(together, reverse, atol=1e-6)


def test_logits_equal_transformers(topics: tuple[Local, Path]) -> None:
    model, source = topics
    texts: list[Text] = ["the man", (QUERY, "a café"), ""]
    result = model.classify(texts)
    expected = np.stack([logits_of(source, *each) for each in (["the man"], [QUERY, "a café"], [""])])
    np.testing.assert_allclose(result.logits, expected, atol=ATOL)
    np.testing.assert_allclose(result.scores, torch.softmax(torch.tensor(expected), -1), atol=ATOL)
    assert (result.labels, result.activation) == (("art", "law", "sea"), "softmax")
    assert [label for label, _ in result.top(1)[0]] == [result.labels[expected[0].argmax()]]
    ids = [token.id for token in model.tokenize(["the man"])[0].tokens]
    np.testing.assert_array_equal(model.classify([ids]).logits, model.classify(["the man"]).logits)
    assert model.classify([]).logits.shape == (0, 3)


def test_openvino_equals_onnx_runtime(
    topics: tuple[Local, Path], classifier_bundle: Callable[[str], Path]
) -> None:
    with attnlens_server.local(classifier_bundle("topics"), threads=1, engine="openvino") as model:
        found = model.classify(DOCUMENTS)
        assert found.engine == "openvino"
        np.testing.assert_allclose(found.logits, topics[0].classify(DOCUMENTS).logits, atol=1e-4)


def test_token_vectors_are_those_of_the_encoder(reranker: tuple[Local, Path]) -> None:
    model, source = reranker
    encoder = AutoModelForSequenceClassification.from_pretrained(source).eval().base_model
    with torch.no_grad():
        encoded = AutoTokenizer.from_pretrained(source)("the man", return_tensors="pt")
        expected = encoder(**encoded).last_hidden_state[0].numpy()
    [text] = model.encode(["the man"])
    assert text.last_hidden_state is not None
    np.testing.assert_allclose(text.last_hidden_state, expected, atol=ATOL)


# --- Long documents -------------------------------------------------------------------------------


def test_only_the_document_is_truncated(reranker: tuple[Local, Path]) -> None:
    model, source = reranker
    query, max_tokens = "the man and the sea", model.get_model().max_tokens
    expected = logits_of(source, query, LONG, truncation="only_second", max_length=max_tokens)
    result = model.score(query, [LONG, "the man"])
    np.testing.assert_allclose(result.logits[0], expected[0], atol=ATOL)
    assert result.usages[0].num_tokens == max_tokens < result.usages[0].num_tokens_total
    shorter = model.score(query, [LONG], max_tokens_per_document=3)
    frame = model.score(query, [""]).usages[0].num_tokens
    assert shorter.usages[0].num_tokens == frame + 3


def test_parts_of_a_document_are_scored(reranker: tuple[Local, Path]) -> None:
    model, _ = reranker
    whole = model.tokenize([(QUERY, LONG)])[0].tokens
    ids = [token.id for token in whole if token.source == "second_text"]
    before = [token.id for token in whole][: [token.source for token in whole].index("second_text")]
    has_types = whole[0].text == "[CLS]"
    parts = [ids[start : start + 10] for start in range(0, len(ids), 10)]
    texts = [
        TokenIds(
            [*before, *part, whole[-1].id], [0] * len(before) + [1] * (len(part) + 1) if has_types else []
        )
        for part in parts
    ]
    expected = model.classify(texts).logits[:, 0]
    result = model.score(QUERY, ["the", LONG], long_documents="split", max_tokens_per_document=10)
    assert result.num_parts.tolist() == [1, len(parts)]
    assert result.usages[1].num_tokens == len(ids) + len(parts) * (len(before) + 1)
    assert result.parts[1] == expected.argmax()
    np.testing.assert_allclose(result.logits[1], expected.max(), atol=1e-6)
    [best] = model.rerank(QUERY, [LONG], long_documents="split", max_tokens_per_document=10)
    assert (best.part, best.num_parts, best.logit) == (result.parts[1], len(parts), result.logits[1])


def test_long_queries_and_documents_are_rejected(reranker: tuple[Local, Path]) -> None:
    model, _ = reranker
    with pytest.raises(InputTooLongError, match=r"^query has \d+ tokens, but the limit is \d+: shorten it"):
        model.score(LONG, ["a"])
    with pytest.raises(InputTooLongError, match=r"^pairs\[1\]\.first has \d+ tokens") as caught:
        model.score_pairs([("a", "b"), (LONG, "b")])
    assert caught.value.text_index == 1
    with pytest.raises(InputTooLongError, match=r"^documents\[1\] has \d+ tokens, but the limit is \d+"):
        model.score(QUERY, ["a", LONG], long_documents="reject")


async def test_number_of_parts_is_limited(served: ServedModel) -> None:
    request = documents(LONG * 20, long_documents=2, max_tokens_per_document=1)
    with pytest.raises(errors.RequestTooLargeError, match="the queue holds at most 40"):
        await served.service.score(request, budget(served))
    assert served.service.process.admission.num_texts("logits") == 0
    model = served.service.model
    limited = replace(model, config=replace(model.config, max_computed_tokens=100))
    with pytest.raises(errors.TooExpensiveError, match=r"^long_documents needs .* truncate long documents"):
        await ScoreOperation(served.service.process, limited)(request, budget(served))


# --- Requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"query": "", "inputs": [Input(text="a")]}, "query is empty: send some text"),
        ({"query": "a", "inputs": []}, "documents is empty"),
        ({"inputs": [Input()]}, r"pairs\[0\] is empty"),
        ({"query": "a", "inputs": [Input(text="b")] * 41}, "documents has 41 texts, but the limit is 40"),
        ({"query": "a", "inputs": [Input(text="b" * 200_000)]}, r"documents\[0\] has 200000 bytes"),
        ({"query": "a" * 200_000, "inputs": [Input(text="b")]}, "query has 200000 bytes"),
        ({"query": "a", "inputs": [Input(text="b")], "top_n": -1}, "top_n is -1"),
        ({"inputs": [Input(text="b")], "top_n": 1}, "top_n is set, but pairs are not sorted"),
        (
            {"query": "a", "inputs": [Input(text="b")], "max_tokens_per_document": -1},
            "max_tokens_per_document",
        ),
        (
            {"query": "a", "inputs": [Input(text="b")], "activation": ScoreActivation.SOFTMAX},
            "activation is ACTIVATION_SOFTMAX",
        ),
    ],
)
async def test_invalid_fields_are_named(served: ServedModel, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidFieldsError, match=f"^{message}"):
        await served.service.score(ScoreRequest(**request_), budget(served))


async def test_equal_documents_are_computed_once(served: ServedModel) -> None:
    lanes = served.engine.lanes["logits"]
    before = lanes.num_items
    result = await served.service.score(documents("a", "b", "a", "a"), budget(served))
    assert lanes.num_items - before == 2
    assert {score.index for score in result.scores} == {0, 1, 2, 3}
    assert len(result.usages) == 4


async def test_deadline_and_cancellation_free_everything(served: ServedModel) -> None:
    reserved = served.service.process.admission.memory.used  # by other tests
    late, resources = budget(served, time.monotonic() - 1), budget(served)
    with pytest.raises(errors.DeadlineError):
        await served.service.score(documents("a"), late)
    task = asyncio.create_task(served.service.score(documents(*map(str, range(30))), resources))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert served.service.process.admission.num_texts("logits") == 0
    for each in (late, resources):
        each.memory.release()
    assert served.service.process.admission.memory.used == reserved


async def test_full_queue_rejects_classification_too(served: ServedModel) -> None:
    with served.service.process.admission.slots("logits", 39):
        with pytest.raises(errors.OverloadedError):
            await served.service.classify(ClassifyRequest(inputs=[Input(text="a")] * 2), budget(served))
        with pytest.raises(errors.OverloadedError):
            await served.service.score(documents("a", "b"), budget(served))


def test_methods_for_other_models_are_named(reranker: tuple[Local, Path], topics: tuple[Local, Path]) -> None:
    with pytest.raises(NotSupportedError, match="has no embeddings: use Score"):
        reranker[0].embed(["a"])
    with pytest.raises(NotSupportedError, match="has no embeddings: use Classify"):
        topics[0].embed(["a"])
    with pytest.raises(NotSupportedError, match="has 3 labels, but Score needs a reranker"):
        topics[0].score("a", ["b"])
    model = topics[0].get_model()
    assert (model.labels, model.activation, model.embedding_size) == (("art", "law", "sea"), "softmax", 0)
    methods = ("contributions", "leave_one_out", "rollout", "received_attention")
    assert (model.explain_methods, model.pair_matrices) == (methods, ())


async def test_only_the_requested_version_is_used(served: ServedModel) -> None:
    texts, other = [Input(text="a")], "0" * 64
    with pytest.raises(errors.ModelNotFoundError):
        await served.service.score(documents("a", model_version=other), budget(served))
    with pytest.raises(errors.ModelNotFoundError):
        await served.service.classify(ClassifyRequest(inputs=texts, model_version=other), budget(served))


def test_embedding_model_has_no_scores() -> None:
    plans = plans_of(make_model())
    message = "'toy' is not a classifier, which (Score|Classify) needs: use Embed"
    with pytest.raises(errors.NotSupportedError, match=message):
        plans.score.plan(documents("a"))
    with pytest.raises(errors.NotSupportedError, match=message):
        plans.classify.plan(ClassifyRequest(inputs=[Input(text="a")]))


def test_logits_that_are_not_finite_are_rejected() -> None:
    request, plan = documents("a", "b"), ScorePlan("", ScoreActivation.SIGMOID, None)
    for value in (np.nan, np.inf):
        logits = np.array([[1.0], [2.0], [value]], np.float32)
        with pytest.raises(errors.InvalidResultError, match=r"^documents\[1\] has NaN or infinity"):
            scores(request, plan, [0, 1], [1, 2], logits)


# --- Server ---------------------------------------------------------------------------------------


def test_server_answers_over_grpc_and_http_and_to_commands(
    reranker: tuple[Local, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, source = reranker
    expected = model.score(QUERY, DOCUMENTS)
    namespace: dict[str, Any] = {}
    file = tmp_path / "documents.txt"
    file.write_text("\n".join(DOCUMENTS), encoding="utf-8")
    with (
        ServerProcess(source.parent / "bundle", "--http-port", "0") as server,
        Client(server.address) as client,
    ):
        url = server.http_url()
        np.testing.assert_array_equal(client.score(QUERY, DOCUMENTS).logits, expected.logits)
        for block in blocks_of("docs/rerank.md"):
            if block.form == "python":  # the second one uses the client of the first
                exec(block.code.replace("127.0.0.1:50051", server.address), namespace)
        namespace["client"].close()
        assert capsys.readouterr().out.count("\n") == 6
        body = json.dumps({"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).encode()
        with urllib.request.urlopen(f"{url}v1/attnlens/score", body) as reply:
            content = json.load(reply)
        assert content["activation"] == "sigmoid"
        assert [each["index"] for each in content["results"]] == [
            each.index for each in model.rerank(QUERY, DOCUMENTS, top_n=2)
        ]
        with urllib.request.urlopen(f"{url}v1/attnlens/classify", b'{"inputs": ["the man"]}') as reply:
            np.testing.assert_allclose(json.load(reply)["logits"], model.classify(["the man"]).logits)
        check_open_inference(server.address, model)
        assert run(["rerank", QUERY, str(file), "--json", "--address", server.address]) == 0
        ranked = conforms("rerank", capsys.readouterr().out)["results"]
        assert [each["index"] for each in ranked] == [each.index for each in model.rerank(QUERY, DOCUMENTS)]
        assert run(["classify", "the man", "--json", "--address", server.address]) == 0
        assert conforms("classify", capsys.readouterr().out)["labels"][0]["label"] == "LABEL_0"
        assert run(["info", "--json", "--address", server.address]) == 0
        assert conforms("info", capsys.readouterr().out)["labels"] == ["LABEL_0"]
        assert run(["encode", "the man", "--address", server.address]) == 0
        assert "embedding" not in conforms("encode", capsys.readouterr().out)
        assert run(["info", "--address", server.address]) == 0
        assert "reranker, scores are the sigmoid" in capsys.readouterr().out


def check_open_inference(address: str, model: Local) -> None:
    """Compare the logits of pairs, and their declared shape, over the Open Inference Protocol."""
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        name = stub.ServerMetadata(oip.ServerMetadataRequest(), timeout=10).name
        metadata = stub.ModelMetadata(oip.ModelMetadataRequest(), timeout=10)
        texts = {"text_pair": ["a café", ""], "text": [QUERY, "the"]}
        request = oip.ModelInferRequest()
        for each, values in texts.items():
            tensor = request.inputs.add(name=each, datatype="BYTES", shape=[2])
            tensor.contents.bytes_contents.extend(value.encode() for value in values)
        [output] = stub.ModelInfer(request, timeout=10).outputs
    assert (name, [each.name for each in metadata.inputs]) == ("attnlens", ["text", "text_pair"])
    assert [(each.name, list(each.shape)) for each in metadata.outputs] == [("logits", [-1, 1])]
    expected = model.score_pairs(list(zip(texts["text"], texts["text_pair"], strict=True))).logits
    assert (output.name, list(output.shape)) == ("logits", [2, 1])
    np.testing.assert_array_equal(np.array(output.contents.fp32_contents, np.float32), expected)
