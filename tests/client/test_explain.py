"""`explain` and `compare` of both clients, against a real server and against invalid responses."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from attnlens.tensors import to_tensor
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.explanation_pb2 import EXPLAIN_LEVEL_WORDS, EXPLAIN_METHOD_ROLLOUT
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client import (
    BadReplyError,
    Client,
    InputTooLongError,
    InvalidRequestError,
    NotSupportedError,
    RequestTooExpensiveError,
    TokenIds,
)
from attnlens_client.arguments import PairMatrixName
from attnlens_client.core import plans
from attnlens_client.core.explanations import ExplanationReader
from scripted import ScriptedServer
from served import ServerProcess

Call = Callable[..., Any]
Change = Callable[[Any], object]

SENTENCE = "The animal didn't cross the street because it was too tired."
A, B = "A man is playing a guitar.", "Someone plays an instrument."


# --- real server ----------------------------------------------------------------------------------


def test_explanation_attributes_a_vector_to_tokens(minilm_server: ServerProcess, connect: Call) -> None:
    with connect(minilm_server.address) as call:
        [text] = call("explain", [SENTENCE])
        measured = {each.method: each.rank_correlation for each in call("get_model").faithfulness}
        assert text.scores[0].faithfulness == measured.get("contributions")
        rest = f", faithfulness {measured['contributions']:.2f}" if measured else ""
        assert repr(text) == (
            "Explanation(16 tokens, target 1.0000, contributions: animal +0.281, street +0.157, tired +0.146,"
            f" baseline +0.083{rest})"
        )
        assert repr(text.scores) == (
            f"(TokenScores(contributions, float32 (16,), baseline +0.0825, sum 1.0000{rest}),)"
        )
        assert text.values.sum() + text.scores[0].baseline == pytest.approx(1, abs=1e-5)
        assert [token.text for token in text.tokens][:3] == ["[CLS]", "the", "animal"]
        assert text.usage.num_tokens == len(text.labels) == 16
        assert call("explain", []) == []


def test_two_texts_request_a_contrast(minilm_server: ServerProcess, connect: Call) -> None:
    with connect(minilm_server.address) as call:
        vectors = call("embed", [A, B, "It rained."], normalize=True).astype(np.float64)
        [text] = call("explain", [A], to=B, rather_than="It rained.")
        assert text.target_value == pytest.approx(vectors[0] @ (vectors[1] - vectors[2]), abs=1e-5)
        assert text.scores[0].faithfulness is None
        for shown in (repr(text), repr(text.scores), text._repr_html_()):
            assert "faithfulness not measured for this question" in shown
        [text] = call("explain", [A], direction=3 * vectors[1])
        assert text.target_value == pytest.approx(3 * vectors[0] @ vectors[1], abs=1e-5)
        ids = TokenIds([101, 2158, 102])
        [text] = call("explain", [ids], to=("two", "texts"), dimensions=100, pooling="cls")
        assert [token.source for token in text.tokens] == ["ids"] * 3


def test_words_methods_and_heads_match_the_request(minilm_server: ServerProcess, connect: Call) -> None:
    with connect(minilm_server.address) as call:
        methods = ["rollout", "leave_one_out", "contributions"]
        [text] = call("explain", ["Unbelievably."], methods=methods, level="words", head_contributions=True)
        assert text.labels == ("[CLS]", "unbelievably", ".", "[SEP]")
        assert [scores.method for scores in text.scores] == methods
        assert text.by("leave_one_out").baseline is None
        assert np.isnan(text.by("leave_one_out").values[[0, 3]]).all()
        assert text.head_contributions.shape == (6, 12)
        assert text.top(1, "leave_one_out")[0][0] == "unbelievably"
        with pytest.raises(ValueError, match=r"there are 3 methods: use `by\(METHOD\)"):
            _ = text.values
        with pytest.raises(KeyError, match="output_share: use one of rollout"):
            text.by("output_share")


def test_comparison_attributes_similarity_to_token_pairs(minilm_server: ServerProcess, connect: Call) -> None:
    with connect(minilm_server.address) as call:
        pair = call("compare", A, B, matrix="interaction")
        assert pair.similarity == pytest.approx(0.667446, abs=1e-5)
        assert pair.top_pairs(1) == [("guitar", "instrument", pytest.approx(0.4181, abs=1e-4))]
        assert "similarity 0.6674" in repr(pair)
        assert pair.a.target_value == pytest.approx(pair.similarity)
        inputs = call("compare", A, B, matrix="input", dimensions=100)
        assert inputs.baseline_row.shape == (7,)
        assert inputs.baseline_column.shape == (9,)
        total = sum(
            map(np.sum, (inputs.matrix, inputs.baseline_row, inputs.baseline_column, inputs.baseline))
        )
        assert total == pytest.approx(inputs.similarity, abs=1e-4)
        assert pair.baseline_row is pair.baseline_column is pair.baseline is None
        with pytest.raises(ValueError, match="there is no matrix"):
            call("compare", A, B).top_pairs()
        prompted = call("compare", A, B, prompt_a="query: ", prompt_b="passage: ")
        [first] = call("embed", [A], prompt="query: ", normalize=True)
        [second] = call("embed", [B], prompt="passage: ", normalize=True)
        assert prompted.similarity == pytest.approx(first @ second, abs=1e-5)


def test_many_texts_are_split_into_calls_in_order(minilm_server: ServerProcess, passages: list[str]) -> None:
    texts = [text[:60] for text in passages[:40]]
    with Client(minilm_server.address, batch_size=7) as client:
        found = client.explain(texts, to=B)
        cosines = client.embed(texts, normalize=True) @ client.embed([B], normalize=True)[0]
    np.testing.assert_allclose([text.target_value for text in found], cosines, atol=1e-5)


def test_texts_with_too_many_runs_for_a_request_are_split(minilm_server: ServerProcess) -> None:
    with Client(minilm_server.address) as client:
        assert client.get_model().limits.max_computed_tokens == 1 << 18
        found = client.explain(
            ["word " * 9] * 130, methods="leave_one_out"
        )  # the byte length allows up to 48 tokens each
    values = [text.values for text in found]
    np.testing.assert_allclose(values[1:], values[:-1], atol=1e-6)


def test_failures_name_the_argument(minilm_server: ServerProcess, connect: Call) -> None:
    with connect(minilm_server.address) as call:
        with pytest.raises(InputTooLongError, match=r"texts\[1\] has 302 tokens"):
            call("explain", ["a", "word " * 300])
        with pytest.raises(InputTooLongError, match="to has 302 tokens"):
            call("explain", ["a"], to="word " * 300)
        with pytest.raises(InputTooLongError, match=r"pairs\[0\].b has 302 tokens"):
            call("compare", "a", "word " * 300)
        with pytest.raises(InvalidRequestError, match=r"direction has the shape \[3\]"):
            call("explain", ["a"], direction=[1, 2, 3])


def test_single_text_with_too_many_runs_is_rejected(minilm_bundle: Any) -> None:
    with (
        ServerProcess(minilm_bundle, "--max-computed-tokens", "10") as server,
        Client(server.address) as client,
        pytest.raises(RequestTooExpensiveError) as caught,
    ):
        client.explain(["word " * 20], methods="leave_one_out")
    assert (caught.value.computed_tokens, caught.value.max_computed_tokens) == (20 * 22, 10)


def test_calls_are_split_by_the_server_limits_and_retried(server: ScriptedServer, connect: Call) -> None:
    server.limits = {"max_inputs_per_request": 3, "max_computed_tokens": 700}
    with connect(server.address) as call:
        found = call("explain", ["a", "bb", "ccc", "dd", "e"])
        assert [len(text.tokens) for text in found] == [1, 2, 3, 2, 1]
        sent = [request for request in server.requests if isinstance(request, pb.ExplainRequest)]
        assert sorted(len(request.inputs) for request in sent) == [2, 3]
        with pytest.raises(BadReplyError, match="methods contributions, expected leave_one_out"):
            call("explain", ["a", "bb", "ccc", "dd", "e"], methods="leave_one_out")
        sent = [request for request in server.requests if isinstance(request, pb.ExplainRequest)]
        assert {len(request.inputs) for request in sent[2:]} <= {2, 3}  # retried as for other methods
        with pytest.raises(BadReplyError):
            call("explain", ["word" * 5] * 3, methods="leave_one_out")
        sent = [request for request in server.requests if isinstance(request, pb.ExplainRequest)]
        long = [request for request in sent if request.inputs[0].text.startswith("word")]
        assert (
            max(len(request.inputs) for request in long) == 2
        )  # at most 16 tokens each: 256 computed tokens
        with pytest.raises(NotSupportedError, match="nothing is compared here"):
            call("compare", "a", "b")


# --- arguments ------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rather_than alone": ({"rather_than": "a"}, ValueError, "rather_than is set, but to is not"),
    "an index alone": ({"rather_than": 1}, ValueError, "rather_than is a label, but label is not set"),
    "a label and a text": (
        {"label": 0, "to": "a"},
        ValueError,
        "label is set in addition to to or direction",
    ),
    "a pair as a label": ({"label": ("a", "b")}, TypeError, "label is tuple: use the name or index"),
    "two targets": ({"to": "a", "direction": [1.0]}, ValueError, "to and direction are both set"),
    "a matrix": ({"direction": [[1.0]]}, ValueError, r"direction has the shape \(1, 1\): use a vector"),
    "words for a direction": ({"direction": "up"}, TypeError, "direction is str: use a vector of numbers"),
    "no text": ({"to": 7}, TypeError, "to is int: use a str"),
    "no method": ({"methods": []}, ValueError, r"methods is \[\]: use at least one method, each once"),
    "a method twice": (
        {"methods": ["rollout", "rollout"]},
        ValueError,
        "use at least one method, each once",
    ),
    "an unknown method": ({"methods": "attention"}, ValueError, "methods is 'attention': use one of"),
    "an unknown level": ({"level": "letters"}, ValueError, "level is 'letters': use one of tokens"),
    "no dimensions": ({"dimensions": 0}, ValueError, "dimensions is 0: use 1 to"),
    "two prompts": ({"prompt": "a", "prompt_name": "b"}, ValueError, "both set"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG.values(), ids=WRONG)
def test_invalid_explain_argument_is_reported_before_anything_is_sent(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        plans.explain(["a"], **arguments)
    with pytest.raises(ValueError, match="matrix is 'other': use one of output, interaction, input"):
        plans.compare("a", "b", matrix="other")  # type: ignore[arg-type]


# --- invalid responses ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stub(minilm_server: ServerProcess) -> Iterator[EncoderServiceStub]:
    with grpc.insecure_channel(minilm_server.address) as channel:
        yield EncoderServiceStub(channel)


def put(place: int, value: float) -> Change:
    """Return a change that sets a score of the first method."""

    def change(text: pb.Explanation) -> None:
        tensor = text.scores[0].values
        numbers = np.frombuffer(tensor.data, "<f4").copy()
        numbers[place] = value
        tensor.data = numbers.tobytes()

    return change


def shifted(text: pb.Explanation) -> None:
    """Return a change that shifts a score and the sum, so that they no longer add up to the target."""
    tensor = text.scores[0].values
    numbers = np.frombuffer(tensor.data, "<f4").copy()
    numbers[2] += 5e-5
    tensor.data = numbers.tobytes()
    text.scores[0].sum += 5e-5


def shortened(text: pb.Explanation) -> None:
    text.scores[0].values.CopyFrom(to_tensor(np.zeros(3, np.float32), DataType.DATA_TYPE_FLOAT32))


CHANGES: dict[str, tuple[Change, str]] = {
    "a score": (put(2, 0.5), "with the sum"),
    "a score and the sum": (shifted, "with the sum"),
    "non-finite score": (put(2, np.nan), "not finite"),
    "too few scores": (shortened, r": shape \(3,\), expected \(16\)"),
    "no baseline": (
        lambda text: text.scores[0].ClearField("baseline"),
        "no baseline of contributions",
    ),
    "another baseline": (lambda text: setattr(text.scores[0], "baseline", 0.2), "with the sum"),
    "another sum": (lambda text: setattr(text.scores[0], "sum", 1.1), "with the sum"),
    "another target": (lambda text: setattr(text, "target_value", 0.9), "but the target value 0.9"),
    "nothing is promised": (
        lambda text: text.scores[0].ClearField("expected_sum"),
        "but the target value 1.0",
    ),
    "non-finite target": (
        lambda text: setattr(text, "target_value", np.inf),
        "has the target value inf",
    ),
    "another method": (
        lambda text: setattr(text.scores[0], "method", EXPLAIN_METHOD_ROLLOUT),
        "has the methods rollout, expected contributions",
    ),
    "no scores": (lambda text: text.ClearField("scores"), "has the methods , expected"),
    "a token": (lambda text: text.tokens.pop(), "has 15 tokens.*, expected 16"),
    "words": (lambda text: text.unit_ids.extend([0] * 16), "has unrequested words"),
    "heads": (
        lambda text: text.head_contributions.shape.extend([6, 12]),
        "has unrequested contributions of heads",
    ),
    "faithfulness": (lambda text: setattr(text.scores[0], "faithfulness", 2.0), "with the rank correlation"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_inconsistent_explanation_is_rejected(stub: EncoderServiceStub, change: Change, message: str) -> None:
    inputs = [pb.Input(text=SENTENCE)]
    reply = stub.Explain(pb.ExplainRequest(inputs=inputs))

    def read() -> list[Any]:
        reader = ExplanationReader(
            "", inputs, ["contributions"], has_words=False, has_heads=False, may_truncate=False
        )
        return reader.texts([(0, 1, reply)])

    assert len(read()) == 1
    change(reply.results[0])
    with pytest.raises(BadReplyError, match=message):
        read()


def test_words_must_start_in_order(stub: EncoderServiceStub) -> None:
    inputs = [pb.Input(text=SENTENCE)]
    reply = stub.Explain(pb.ExplainRequest(inputs=inputs, level=EXPLAIN_LEVEL_WORDS))

    def read() -> list[Any]:
        reader = ExplanationReader(
            "", inputs, ["contributions"], has_words=True, has_heads=False, may_truncate=False
        )
        return reader.texts([(0, 1, reply)])

    assert len(read()) == 1
    swapped = {1: 2, 2: 1}
    words = reply.results[0].unit_ids
    words[:] = [swapped.get(word, word) for word in words]
    with pytest.raises(BadReplyError, match="has the word index 2 after 0, out of order"):
        read()


def cell(pair: pb.Comparison) -> None:
    numbers = np.frombuffer(pair.matrix.data, "<f4").copy()
    numbers[3] += 0.1
    pair.matrix.data = numbers.tobytes()


PAIR_CHANGES: dict[str, tuple[Change, str]] = {
    "another similarity": (lambda pair: setattr(pair, "similarity", 0.5), "the similarity is 0.5"),
    "beyond 1": (lambda pair: setattr(pair, "similarity", 1.5), "the similarity is 1.5"),
    "no matrix": (lambda pair: pair.ClearField("matrix"), "has no matrix"),
    "a transposed matrix": (
        lambda pair: pair.matrix.shape.__setitem__(slice(None), [7, 9]),
        r": shape \(7, 9\), expected \(9, 7\)",
    ),
    "a cell": (cell, "the matrix with the sum"),
    "sides in the wrong order": (
        lambda pair: pair.a.CopyFrom(pb.Explanation.FromString(pair.b.SerializeToString())),
        r"texts\[0\] has a token with offsets out of range: characters 17 to 27",
    ),
}


def off_by(field: str) -> Change:
    """Change an element of a baseline by slightly more than rounding errors."""

    def change(pair: pb.Comparison) -> None:
        numbers = np.frombuffer(getattr(pair, field).data, "<f4").copy()
        numbers[2] += 1e-3
        getattr(pair, field).data = numbers.tobytes()

    return change


INPUT_CHANGES: dict[str, tuple[Change, str]] = {
    "a cell": (cell, "the matrix with its baselines with the sum"),
    "the row": (off_by("baseline_row"), "the matrix with its baselines with the sum"),
    "the column": (off_by("baseline_column"), "the matrix with its baselines with the sum"),
    "the corner": (lambda pair: setattr(pair, "baseline", 0.5), "the matrix with its baselines with the sum"),
    "no number": (lambda pair: setattr(pair, "baseline", np.nan), "not finite"),
    "no row": (lambda pair: pair.ClearField("baseline_row"), "has no baseline_row"),
    "no corner": (lambda pair: pair.ClearField("baseline"), "has no baseline of the matrix"),
    "a row for a column": (
        lambda pair: pair.baseline_column.CopyFrom(pair.baseline_row),
        r": shape \(7,\), expected \(9\)",
    ),
}


@pytest.mark.parametrize(
    ("matrix", "change", "message"),
    [
        *(("output", *each) for each in PAIR_CHANGES.values()),
        *(("input", *each) for each in INPUT_CHANGES.values()),
        ("output", lambda pair: setattr(pair, "baseline", 0.0), "has unrequested baseline of the matrix"),
    ],
    ids=[*PAIR_CHANGES, *(f"input: {name}" for name in INPUT_CHANGES), "a baseline of another matrix"],
)
def test_inconsistent_comparison_is_rejected(
    stub: EncoderServiceStub, matrix: PairMatrixName, change: Change, message: str
) -> None:
    plan = plans.compare(A, B, matrix=matrix, dimensions=20)
    reply = stub.Compare(plan.request)
    assert plan.parse(reply).matrix is not None
    change(reply.results[0])
    with pytest.raises(BadReplyError, match=message):
        plan.parse(reply)
