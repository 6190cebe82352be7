"""Explanations of logits, alone and with ranked documents, compared with another method in float64."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import attnlens_server
from attnlens.explanations import ExplainLevel, relevant_spans
from attnlens_cli.app import run
from attnlens_client import Explanation, InvalidRequestError, NotSupportedError, Text, TokenIds
from attnlens_server import Local, ServerConfig
from attnlens_server.clients import Client
from attnlens_server.core.admission import Budget, Reservation
from attnlens_server.core.process import State
from attnlens_server.operations.documents import LongDocuments, ScoreRequest
from attnlens_server.operations.explanations import words_of_document
from attnlens_server.rates import UNLIMITED, RateLimits
from attnlens_server.served_model import ServedModel
from attnlens_server.text import Input
from schemas import conforms
from served import ServerProcess
from server.decomposed_bert import contributions
from server.test_classifiers import DOCUMENTS, LONG, QUERY
from tampered import copy_of, manifest_of

if TYPE_CHECKING:
    from attnlens_client.arguments import ExplainLevelName

ATOL = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def reranker(classifier_bundle: Callable[[str], Path]) -> Iterator[tuple[Local, Path]]:
    bundle = classifier_bundle("reranker")
    with attnlens_server.local(bundle, threads=1) as model:
        yield model, bundle.parent / "source"


@pytest.fixture(scope="module")
def topics(classifier_bundle: Callable[[str], Path]) -> Iterator[tuple[Local, Path]]:
    bundle = classifier_bundle("topics")
    with attnlens_server.local(bundle, threads=1) as model:
        yield model, bundle.parent / "source"


def decomposed(source: Path, *texts: str, **options: Any) -> np.ndarray:
    """Return the contributions (T + 1, C) to the logits, the biases last, by the other method."""
    model = AutoModelForSequenceClassification.from_pretrained(source)
    encoded = AutoTokenizer.from_pretrained(source)(
        *([text] for text in texts), return_tensors="pt", **options
    )
    return contributions(model, **encoded)


def check(explanation: Explanation, expected: np.ndarray) -> None:
    """Compare with expected contributions (T + 1,), the biases last."""
    scores = explanation.by("contributions")
    np.testing.assert_allclose(scores.values, expected[:-1], atol=ATOL)
    assert scores.baseline == pytest.approx(expected[-1], abs=ATOL)
    size = abs(explanation.target_value) + float(np.abs(expected).sum())
    assert abs(scores.sum - explanation.target_value) < 1e-5 * size
    sums = explanation.sums_by_source
    assert sums is not None
    assert sum(sums.values()) == pytest.approx(explanation.target_value, abs=ATOL)
    for source in ("text", "second_text", "special"):
        rows = [row for row, token in enumerate(explanation.tokens) if token.source == source]
        assert sums[source] == pytest.approx(expected[rows].sum(), abs=ATOL)


# --- Explain --------------------------------------------------------------------------------------


def test_contributions_to_a_logit_equal_the_parts_that_tokens_carry_forward(
    reranker: tuple[Local, Path],
) -> None:
    model, source = reranker
    pairs: list[Text] = [(QUERY, document) for document in DOCUMENTS]
    logits = model.score(QUERY, DOCUMENTS).logits
    for explanation, logit, document in zip(model.explain(pairs), logits, DOCUMENTS, strict=True):
        check(explanation, decomposed(source, QUERY, document)[:, 0])
        assert explanation.target_value == pytest.approx(logit, abs=ATOL)


def test_labels_and_their_difference_are_explained(topics: tuple[Local, Path]) -> None:
    model, source = topics
    parts, logits = decomposed(source, "the man"), model.classify(["the man"]).logits[0]
    [sea] = model.explain(["the man"], label="sea")
    check(sea, parts[:, 2])
    assert sea.target_value == pytest.approx(logits[2], abs=ATOL)
    [difference] = model.explain(["the man"], label=2, rather_than="art")
    check(difference, parts[:, 2] - parts[:, 0])
    assert difference.target_value == pytest.approx(logits[2] - logits[0], abs=ATOL)


@pytest.fixture
def with_faithfulness(classifier_bundle: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return copies of bundles with a measured faithfulness of contributions."""

    def copied(name: str) -> Path:
        bundle = copy_of(classifier_bundle(name), tmp_path)
        with manifest_of(bundle) as manifest:
            measured = {"method": "EXPLAIN_METHOD_CONTRIBUTIONS", "rank_correlation": 0.55, "num_texts": 30}
            manifest["faithfulness"] = [measured]
        return bundle

    return copied


def test_faithfulness_of_a_classifier_is_that_of_the_highest_logit_of_a_text(
    with_faithfulness: Callable[[str], Path],
) -> None:
    text = "the man and the cat in the sea"
    with attnlens_server.local(with_faithfulness("topics"), threads=1) as model:
        highest, second, *_ = np.argsort(-model.classify([text]).logits[0]).tolist()
        [explanation] = model.explain([text], label=highest)
        assert explanation.scores[0].faithfulness == 0.55
        for inputs, options in (
            (text, {"label": second}),
            (text, {"label": highest, "rather_than": second}),
            (text, {"label": highest, "level": "words"}),
            ((text, text), {"label": int(model.classify([(text, text)]).logits[0].argmax())}),
        ):
            [explanation] = model.explain([inputs], **options)
            assert explanation.scores[0].faithfulness is None


def test_faithfulness_of_a_reranker_is_that_of_the_tokens_of_a_pair(
    with_faithfulness: Callable[[str], Path],
) -> None:
    with attnlens_server.local(with_faithfulness("reranker"), threads=1) as model:
        pair = (QUERY, "the man and the cat in the sea")
        levels: dict[ExplainLevelName, float | None] = {"tokens": 0.55, "words": None}
        for level, expected in levels.items():
            [explanation] = model.explain([pair], level=level)
            [ranked] = model.rerank(pair[0], [pair[1]], explain=True, level=level)
            assert ranked.explanation is not None
            for found in (explanation, ranked.explanation):
                assert found.scores[0].faithfulness == expected
        [alone] = model.explain([pair[1]])
        assert alone.scores[0].faithfulness is None


def test_leave_one_out_is_the_decrease_of_the_logit(topics: tuple[Local, Path]) -> None:
    model, source = topics
    [explanation] = model.explain(
        [(QUERY, "a café")], label="law", methods=["contributions", "leave_one_out"]
    )
    reference = AutoModelForSequenceClassification.from_pretrained(source).eval()
    encoded = AutoTokenizer.from_pretrained(source)(QUERY, "a café", return_tensors="pt")
    with torch.no_grad():
        whole = reference(**encoded).logits[0, 1]
        for row, effect in enumerate(explanation.by("leave_one_out").values):
            if explanation.tokens[row].source == "special":
                assert np.isnan(effect)
                continue
            encoded["attention_mask"][0, row] = 0
            assert effect == pytest.approx(float(whole - reference(**encoded).logits[0, 1]), abs=ATOL)
            encoded["attention_mask"][0, row] = 1


def test_words_and_heads_of_a_logit(topics: tuple[Local, Path]) -> None:
    model, _ = topics
    text = ["it rained", "a café in the sea"]
    tokens = model.explain(text, label=0, head_contributions=True)
    for by_token, by_word in zip(tokens, model.explain(text, label=0, level="words"), strict=True):
        sums = np.zeros(len(by_word.units))
        np.add.at(sums, list(by_word.unit_ids), by_token.values)
        np.testing.assert_allclose(by_word.values, sums, atol=1e-6)
        assert by_token.head_contributions is not None
        assert by_token.head_contributions.shape == (1, 3)


def test_openvino_explains_logits_like_onnx_runtime(topics: tuple[Local, Path]) -> None:
    model, source = topics
    bundle = source.parent / "bundle"
    with attnlens_server.local(bundle, threads=1, engine="openvino") as other:
        [found] = other.explain([(QUERY, "a café")], label=1, head_contributions=True)
    [expected] = model.explain([(QUERY, "a café")], label=1, head_contributions=True)
    np.testing.assert_allclose(found.values, expected.values, atol=ATOL)
    assert found.head_contributions is not None
    assert expected.head_contributions is not None
    np.testing.assert_allclose(found.head_contributions, expected.head_contributions, atol=ATOL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "label.label is not set: use one of 'art', 'law', 'sea'"),
        ({"label": "se"}, "label.label is 'se': use one of 'art'"),
        ({"label": 3}, "label.label is 3: use 0 to 2"),
        ({"label": -1}, "label.label is -1: use 0 to 2"),
        ({"label": 0, "rather_than": "art"}, "label.rather_than is 'art', as label.label"),
        ({"to": "a"}, "to is set, but 'topics' is a classifier without embeddings"),
        ({"direction": [1.0, 0.0, 0.0]}, "direction is set, but 'topics' is a classifier"),
        ({"label": 0, "pooling": "cls"}, "pooling is set"),
        ({"label": 0, "dimensions": 2}, "dimensions is set"),
        ({"label": 0, "methods": "output_share"}, "logits are not sums of token vectors"),
    ],
)
def test_targets_and_methods_of_embeddings_are_rejected(
    topics: tuple[Local, Path], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        topics[0].explain(["a"], **arguments)


def test_methods_without_a_meaning_for_logits_are_not_supported(topics: tuple[Local, Path]) -> None:
    with pytest.raises(NotSupportedError, match="it scores parts of embeddings"):
        topics[0].explain(["a"], label=0, methods="contribution_norm")
    with pytest.raises(NotSupportedError, match="Compare needs embeddings: use Explain with a pair"):
        topics[0].compare("a", "b")


def test_label_of_a_model_of_embeddings_is_rejected(small_bundle: Callable[[str], Path]) -> None:
    with (
        attnlens_server.local(small_bundle("wordpiece"), threads=1) as model,
        pytest.raises(InvalidRequestError, match=r"label is set, but .* is not a classifier: omit it"),
    ):
        model.explain(["a"], label=0)


# --- Score ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_n", [None, 2])
def test_each_returned_document_is_explained(reranker: tuple[Local, Path], top_n: int | None) -> None:
    model, source = reranker
    documents = [*DOCUMENTS, LONG]
    plain = model.rerank(QUERY, documents, top_n=top_n)
    ranked = model.rerank(QUERY, documents, top_n=top_n, explain=True, level="tokens")
    assert [each.index for each in ranked] == [each.index for each in plain]
    for explained, expected in zip(ranked, plain, strict=True):
        assert explained.logit == pytest.approx(expected.logit, abs=1e-6)
        explanation = explained.explanation
        assert explanation is not None
        assert explanation.target_value == pytest.approx(explained.logit, abs=1e-6)
        cut = {"truncation": "only_second", "max_length": 34} if explained.document == LONG else {}
        check(explanation, decomposed(source, QUERY, explained.document, **cut)[:, 0])


def test_documents_that_are_not_returned_are_not_explained(reranker: tuple[Local, Path]) -> None:
    _, source = reranker
    served = ServedModel(ServerConfig(bundle=source.parent / "bundle", threads=1))
    served.engine.start(served.max_tokens)
    served.service.process.state = State.SERVING

    def items_of(**options: Any) -> tuple[int, int]:
        before = [served.engine.lanes[kind].num_items for kind in ("logits", "contributions")]
        inputs = [Input(text=text) for text in ("a", "the man", "a", "it rained")]
        request = ScoreRequest(query=QUERY, inputs=inputs, explanation_level=ExplainLevel.WORDS, **options)
        rates = RateLimits(lambda: 0.0)
        rates.configure(UNLIMITED, 1, 1, 1000)
        budget = Budget(Reservation(served.service.process.admission, Client("search", rates=rates)), None)
        result = asyncio.run(served.service.score(request, budget))
        further = result.usages[result.scores[0].index].num_tokens if "top_n" in options else 0
        assert rates._tokens.level() == 1000 - budget.metrics.num_tokens - further
        after = [served.engine.lanes[kind].num_items for kind in ("logits", "contributions")]
        return after[0] - before[0], after[1] - before[1]

    try:
        assert items_of(top_n=1) == (3, 1)
        assert items_of() == (0, 3), "the contributions graph computes the logits too"
        assert served.service.process.admission.num_texts("contributions") == 0
        assert served.service.process.admission.num_texts("logits") == 0
    finally:
        served.engine.close()
        served.service.process.workers.close()


def test_best_part_of_a_split_document_is_explained(reranker: tuple[Local, Path]) -> None:
    model, _ = reranker
    document = "it was wet " * 30 + "a café in the sea"
    [result] = model.rerank(QUERY, [document], long_documents="split", explain=True, level="tokens")
    explanation = result.explanation
    assert result.num_parts > 1
    assert explanation is not None
    assert explanation.target_value == pytest.approx(result.logit, abs=1e-6)
    own = [row for row, token in enumerate(explanation.tokens) if token.source == "second_text"]
    types = [int(row >= own[0]) for row in range(len(explanation.tokens))]
    ids = TokenIds([token.id for token in explanation.tokens], types)
    assert model.classify([ids]).logits[0, 0] == pytest.approx(result.logit, abs=1e-6)


def test_prompt_is_a_source_of_its_own(reranker: tuple[Local, Path]) -> None:
    model, source = reranker
    [result] = model.rerank(QUERY, ["it rained"], prompt="the sea ", explain=True, level="tokens")
    assert result.explanation is not None
    expected = decomposed(source, f"the sea {QUERY}", "it rained")[:, 0]
    sums = result.explanation.sums_by_source
    assert sums is not None
    rows = [row for row, token in enumerate(result.explanation.tokens) if token.source == "prompt"]
    assert len(rows) >= 2
    assert sums["prompt"] == pytest.approx(expected[rows].sum(), abs=ATOL)


def test_explanations_need_an_enabled_server(reranker: tuple[Local, Path]) -> None:
    bundle = reranker[1].parent / "bundle"
    with (
        attnlens_server.local(bundle, threads=1, explain=False) as model,
        pytest.raises(NotSupportedError, match="explanations are disabled"),
    ):
        model.rerank(QUERY, ["a"], explain=True)


# --- Commands -------------------------------------------------------------------------------------


def test_commands_show_explanations(
    reranker: tuple[Local, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "documents.txt"
    file.write_text("a café in the sea\nthe man\n", encoding="utf-8")
    documents = file.read_text(encoding="utf-8").splitlines()
    expected = reranker[0].rerank(QUERY, documents, explain=True)
    with ServerProcess(reranker[1].parent / "bundle") as server:
        address = ("--address", server.address)
        assert run(["rerank", QUERY, str(file), "--explain", *address]) == 0
        shown = capsys.readouterr().out
        for rank, result in enumerate(expected, 1):
            assert f"{rank}. score {result.score:.4f}, logit {result.logit:+.4f}, row {result.index}" in shown
            assert result.explanation is not None
            assert result.explanation.sums_by_source is not None
            assert f"document {result.explanation.sums_by_source['second_text']:+.4f}" in shown
        assert "café -0.2210" in shown
        assert run(["rerank", QUERY, str(file), "--explain", "--json", *address]) == 0
        ranked = conforms("rerank", capsys.readouterr().out)["results"]
        assert [each["explanation"]["target_value"] for each in ranked] == pytest.approx(
            [each.logit for each in expected], abs=1e-6
        )
        assert run(["explain", QUERY, "--text-pair", documents[0], "--words", *address]) == 0
        shown = capsys.readouterr().out
        assert "target: logit, -0.4467" in shown
        assert "café (second)" in shown
        assert "By source: text -0.3751, second text -0.5986" in shown
        assert run(["explain", QUERY, "--text-pair", documents[0], "--json", *address]) == 0
        assert conforms("explain", capsys.readouterr().out)["text_pair"] == documents[0]


def test_commands_explain_labels(topics: tuple[Local, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with ServerProcess(topics[1].parent / "bundle") as server:
        address = ("--address", server.address)
        assert run(["explain", "the man", "--label", "sea", "--rather-than", "art", *address]) == 0
        assert "target: logit of 'sea' minus that of 'art', +1.3656" in capsys.readouterr().out
        assert run(["explain", "the man", "--label", "sea", "--json", *address]) == 0
        assert conforms("explain", capsys.readouterr().out)["label"] == "sea"
        assert run(["explain", "the man", "--label", "se", *address]) == 1
        assert "label.label is 'se': use one of 'art', 'law', 'sea'" in capsys.readouterr().err


# --- Relevant spans -------------------------------------------------------------------------------


def test_relevant_words_in_succession_form_a_span() -> None:
    words = [(0, 2), (3, 7), (8, 9), (9, 14), (15, 16)]
    found = relevant_spans(words, [0.1, 2.0, 1.0, -3.0, 0.9])
    assert [(span.start, span.end) for span in found] == [(3, 9), (15, 16)]
    assert [span.score for span in found] == pytest.approx([3 / 4, 0.9 / 4])
    assert [span.start for span in relevant_spans(words, [0.1, 2.0, 1.0, -3.0, 0.9], threshold=0.5)] == [3]
    assert [span.start for span in relevant_spans(words, [1.0, -1, 0, -1, 2.0], max_spans=1)] == [15]


@pytest.mark.parametrize("values", [[], [-1.0, -2.0], [0.0, 0.0]])
def test_document_without_positive_contributions_has_no_spans(values: list[float]) -> None:
    assert relevant_spans([(0, 1), (2, 3)][: len(values)], values) == []


def test_words_of_a_document_have_code_points(reranker: tuple[Local, Path]) -> None:
    bundle = reranker[1].parent / "bundle"
    served = ServedModel(ServerConfig(bundle=bundle, threads=1))
    served.engine.start(served.max_tokens)
    served.service.process.state = State.SERVING
    document = "東京 café rained"
    request = ScoreRequest(
        query=QUERY,
        inputs=[Input(text=document)],
        explanation_level=ExplainLevel.WORDS,
        long_documents=LongDocuments.REJECT,
    )
    try:
        result = asyncio.run(
            served.service.score(request, Budget(Reservation(served.service.process.admission), None))
        )
    finally:
        served.engine.close()
        served.service.process.workers.close()
    explanation = result.scores[0].explanation
    assert explanation is not None
    spans, values = words_of_document(explanation)
    assert [document[start:end] for start, end in spans][-2:] == ["café", "rained"]
    assert explanation.sums_by_source is not None
    assert sum(values) == pytest.approx(explanation.sums_by_source.second_text, abs=1e-6)
