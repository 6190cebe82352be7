"""Both clients score and classify: arguments, splitting and invalid replies, against a scripted server."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import Activation
from attnlens_client import BadReplyError, Client, InvalidRequestError
from bad_replies import put
from scripted import ScriptedServer

Call = Callable[..., Any]
Change = Callable[[Any], object]

DOCUMENTS = ["aaa", "b" * 9, "", "cc", "d" * 9]


def sent(server: ScriptedServer) -> list[pb.ScoreRequest]:
    return [request for request in server.requests if isinstance(request, pb.ScoreRequest)]


def test_documents_of_several_calls_are_ranked_together(connect: Call) -> None:
    with ScriptedServer(max_inputs_per_request=2) as server, connect(server.address) as call:
        result = call("score", "q", DOCUMENTS)
        assert result.logits.tolist() == [3, 9, 0, 2, 9]
        assert len(result.usages) == 5
        ranked = call("rerank", "q", iter(DOCUMENTS), top_n=3)
        assert [(each.index, each.logit) for each in ranked] == [(1, 9), (4, 9), (0, 3)]
        assert [each.document for each in ranked] == ["b" * 9, "d" * 9, "aaa"]
        pairs = call("score_pairs", [("q", document) for document in DOCUMENTS])
        assert pairs.logits.tolist() == [3, 9, 0, 2, 9]
        requests = sent(server)
        assert len(requests) == 9
        assert {len(request.documents) + len(request.pairs) for request in requests} == {1, 2}
        assert [request.top_n for request in requests].count(3) == 3


def test_classification_has_sorted_labels(connect: Call) -> None:
    with ScriptedServer(max_inputs_per_request=2) as server, connect(server.address) as call:
        result = call("classify", ["aaa", ("b", "c"), ""], truncate=True)
    assert result.logits.tolist() == [[3, -3], [2, -2], [0, 0]]
    assert result.top() == [
        [("long", 3), ("short", -3)],
        [("long", 2), ("short", -2)],
        [("long", 0), ("short", 0)],
    ]
    assert result.top(1) == [[("long", 3)], [("long", 2)], [("long", 0)]]
    assert all(request.truncate for request in server.requests if isinstance(request, pb.ClassifyRequest))


def test_arguments_are_sent(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        client.rerank(
            "q",
            ["a"],
            top_n=4,
            long_documents="split",
            max_tokens_per_document=7,
            prompt="p: ",
            activation="identity",
        )
    assert sent(server) == [
        pb.ScoreRequest(
            query="q",
            documents=["a"],
            top_n=4,
            long_documents=pb.LONG_DOCUMENTS_SPLIT,
            max_tokens_per_document=7,
            prompt=pb.Prompt(text="p: "),
            activation=Activation.ACTIVATION_IDENTITY,
        )
    ]


@pytest.mark.parametrize(
    ("method", "args", "options", "message"),
    [
        ("rerank", (1, ["a"]), {}, "query is int: use a str"),
        ("rerank", ("", ["a"]), {}, "query is empty"),
        ("rerank", ("\ud800", ["a"]), {}, "query cannot be encoded"),
        ("rerank", ("q", "abc"), {}, "documents is one str"),
        ("rerank", ("q", ["a", ("b", "c")]), {}, r"documents\[1\] is not a text"),
        ("rerank", ("q", ["a", None]), {}, r"documents\[1\] is a missing value"),
        ("rerank", ("q", ["a"]), {"top_n": 0}, "top_n is 0: use 1 to"),
        ("rerank", ("q", ["a"]), {"max_tokens_per_document": -1}, "max_tokens_per_document is -1"),
        ("rerank", ("q", ["a"]), {"long_documents": "cut"}, "long_documents is 'cut': use one of truncate, "),
        ("score", ("q", ["a"]), {"activation": "relu"}, "activation is 'relu': use one of identity, sigmoid"),
        ("score_pairs", (["ab"],), {}, r"pairs\[0\] is not a pair"),
        ("classify", ("abc",), {}, "texts is one str"),
    ],
)
def test_invalid_arguments_are_named(
    server: ScriptedServer, method: str, args: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with Client(server.address) as client, pytest.raises((TypeError, ValueError), match=f"^{message}"):
        getattr(client, method)(*args, **options)
    assert server.requests == []


def test_large_document_is_named_before_it_is_sent(connect: Call) -> None:
    with ScriptedServer(max_text_bytes=1000) as server, connect(server.address) as call:
        with pytest.raises(InvalidRequestError, match=r"^documents\[1\] has 1001 bytes"):
            call("score", "q", ["a", "b" * 1001])
        assert sent(server) == []


SCORE: dict[str, tuple[Change, str]] = {
    "a result missing": (lambda reply: reply.results.pop(), "2 results for documents"),
    "an index twice": (lambda reply: setattr(reply.results[1], "index", 0), "repeated or out of range"),
    "an index too large": (lambda reply: setattr(reply.results[1], "index", 3), "repeated or out of range"),
    "a usage missing": (lambda reply: reply.usages.pop(), "2 usages"),
    "not a number": (lambda reply: setattr(reply.results[0], "logit", np.nan), r"documents\[2\] has the"),
    "another score": (lambda reply: setattr(reply.results[0], "score", 0.5), r"documents\[2\] has the"),
    "no parts": (lambda reply: setattr(reply.results[0], "num_parts", 0), r"documents\[\d\] has part 0 of 0"),
    "another activation": (lambda reply: setattr(reply, "activation", 3), "the activation is 3"),
    "another model": (lambda reply: setattr(reply, "model", "b"), "model of .* is 'b'"),
}  # fmt: skip
CLASSIFY: dict[str, tuple[Change, str]] = {
    "a label missing": (lambda reply: reply.labels.pop(), r"shape \(3, 2\), expected \(3, 1\)"),
    "other scores": (lambda reply: put(reply.scores, 2, 0.5), r"texts\[1\] has scores that do not fit"),
    "infinity": (lambda reply: put(reply.logits, 2, np.inf), r"texts\[1\] has scores that do not fit"),
    "a usage missing": (lambda reply: reply.usages.pop(), "2 usages"),
}


def wrong(change: Change) -> Change:
    def apply(reply: Any) -> None:
        if isinstance(reply, pb.ScoreResponse | pb.ClassifyResponse):
            change(reply)

    return apply


@pytest.mark.parametrize("case", SCORE)
def test_invalid_scores_are_rejected(connect: Call, server: ScriptedServer, case: str) -> None:
    change, message = SCORE[case]
    server.change = wrong(change)
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("score", "q", ["a", "bb", "ccc"], model="scripted")


def test_explained_documents_of_several_calls_are_ranked_together(connect: Call) -> None:
    with ScriptedServer(max_inputs_per_request=2) as server, connect(server.address) as call:
        ranked = call("rerank", "q", DOCUMENTS, top_n=3, explain=True, level="tokens")
    assert [each.explanation.target_value for each in ranked] == [9, 9, 3]
    assert ranked[0].explanation.sums_by_source == {
        "text": 4.5,
        "second_text": 0,
        "prompt": 0,
        "special": 0,
        "ids": 0,
        "baseline": 4.5,
    }
    assert "explanation=Explanation(" in repr(ranked[0])
    assert "baseline +4.5" in ranked[0]._repr_html_()
    assert {request.explanation.level for request in sent(server)} == {1}


EXPLAINED: dict[str, tuple[Change, str]] = {
    "no explanation": (lambda result: result.ClearField("explanation"), "an explanation"),
    "a token missing": (lambda result: result.explanation.tokens.pop(), "tokens, expected"),
    "other contributions": (lambda result: put(result.explanation.scores[0].values, 0, 7), "with the sum"),
    "other sums": (lambda result: setattr(result.explanation.sums_by_source, "text", 7), "sums by source"),
    "infinite sums": (
        lambda result: setattr(result.explanation.sums_by_source, "token_ids", np.inf),
        "infinite",
    ),
    "another target": (lambda result: setattr(result.explanation, "target_value", 7), "the target value 7"),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_invalid_explanations_of_documents_are_rejected(
    connect: Call, server: ScriptedServer, case: str
) -> None:
    change, message = EXPLAINED[case]
    server.change = wrong(lambda reply: change(reply.results[1]))
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("rerank", "q", ["a", "bb", "ccc"], explain=True, level="tokens")


@pytest.mark.parametrize("case", CLASSIFY)
def test_invalid_classifications_are_rejected(connect: Call, server: ScriptedServer, case: str) -> None:
    change, message = CLASSIFY[case]
    server.change = wrong(change)
    with connect(server.address) as call, pytest.raises(BadReplyError, match=message):
        call("classify", ["a", "bb", "ccc"])
