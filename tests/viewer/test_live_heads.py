"""The web page of a reranker or a classifier in a browser, compared with the results of the Python client."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from attnlens_client import Client, Explanation, RankedDocument
from mounted import PREFIX, Mounted
from opened_page import OpenedPage
from served import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser

QUERY = "Who wrote Emma?"
DOCUMENTS = ["It rained.", "Jane Austen wrote Emma.", "The house by the lake was painted in 1815."]
FIRST, SECOND = "A man is playing a guitar.", "Someone plays an instrument."
HOSTILE = "</b><img src=x>"
MINUS = "\N{MINUS SIGN}"
READY = "document.querySelector('textarea')"
RANKED = "document.querySelector('.ranking')"
EXPLAINED = "document.querySelector('.label-reasons .chip')"


class Head(NamedTuple):
    """A server with its page and a client."""

    url: str
    client: Client


@contextmanager
def head_server(bundle: Path, *options: str) -> Iterator[Head]:
    with ServerProcess(bundle, "--http-port", "0", *options) as server, Client(server.address) as client:
        yield Head(server.http_url(), client)


@pytest.fixture(scope="module")
def reranker(classifier_bundle: Callable[[str], Path]) -> Iterator[Head]:
    with head_server(classifier_bundle("reranker")) as head:
        yield head


@pytest.fixture(scope="module")
def topics(classifier_bundle: Callable[[str], Path]) -> Iterator[Head]:
    with head_server(classifier_bundle("topics")) as head:
        yield head


@pytest.fixture
def open_url(browser: "Browser") -> Iterator[Callable[..., OpenedPage]]:
    """Return a function that opens a URL. The teardown asserts that no script errors occurred."""
    opened: list[OpenedPage] = []

    def open_(url: str, **settings: object) -> OpenedPage:
        opened.append(OpenedPage(browser, url, **{"ready": READY} | settings))  # type: ignore[arg-type]
        return opened[-1]

    yield open_
    for page in opened:
        page.close()
    assert [problem for page in opened for problem in page.problems] == []


Open = Callable[..., OpenedPage]


def send(page: OpenedPage, button: str, *texts: str) -> None:
    """Fill in and submit the form, then wait for the result."""
    for index, text in enumerate(texts):
        page.tab.locator("textarea").nth(index).fill(text)
    page.press(button)
    page.wait("document.querySelector('.live .status').textContent !== 'Computing…'")


def classify(page: OpenedPage, *texts: str) -> None:
    send(page, "Classify", *texts)
    wait_for_explanation(page)


def wait_for_explanation(page: OpenedPage) -> None:
    page.wait(f"{EXPLAINED} && document.querySelector('.label-reasons .status').textContent === ''")


def plain(value: float, digits: int = 3) -> str:
    text = f"{abs(value):.{digits}f}"
    return f"{MINUS}{text}" if value < 0 and float(text) else text


def signed(value: float) -> str:
    text = f"{abs(value):.3f}"
    return text if float(text) == 0 else f"{MINUS if value < 0 else '+'}{text}"


def word_scores(explanation: Explanation, source: str) -> list[str]:
    """Return the signed contribution of each word of a source."""
    units = zip(explanation.units, explanation.values, strict=True)
    return [signed(float(value)) for unit, value in units if unit[0].source == source]


def shown_scores(page: OpenedPage, selector: str) -> list[str]:
    """Return the number in the tooltip of each word."""
    titles = page.tab.locator(f"{selector} .chip").evaluate_all("chips => chips.map((chip) => chip.title)")
    return [title.rpartition(": ")[2].partition(" ")[0] for title in titles]


def bars(page: OpenedPage, number: int) -> dict[str, str]:
    """Return the numbers of a bar chart by name."""
    rows = page.tab.locator(":is(.contrast, .label-reasons) .bars").nth(number).locator("tbody tr").all()
    return {row.locator("th").inner_text(): row.locator(".number").inner_text() for row in rows}


def sums_of(explanation: Explanation, **names: str) -> dict[str, float]:
    sums = explanation.sums_by_source or {}
    return {name: sums[source] for source, name in names.items()}


RANKED_SOURCES = {
    "text": "query",
    "second_text": "document",
    "special": "special tokens",
    "baseline": "baseline",
}


def ranked(head: Head) -> list[tuple[RankedDocument, Explanation]]:
    results = head.client.rerank(QUERY, DOCUMENTS, explain=True, level="words")
    return [(result, result.explanation) for result in results if result.explanation is not None]


# --- Rerankers ------------------------------------------------------------------------------------


def test_documents_are_sorted_and_explained(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", QUERY, "\n".join(["", *DOCUMENTS, "  "]))
    expected = ranked(reranker)
    assert len(expected) == len(DOCUMENTS)
    for rank, (result, explanation) in enumerate(expected):
        item = f".ranking > li:nth-child({rank + 1})"
        assert page.text(f"{item} h3") == f"{rank + 1}. Document {result.index + 1}"
        assert (
            page.text(f"{item} .ranked-head .sum") == f"score {result.score:.4f}, logit {plain(result.logit)}"
        )
        assert shown_scores(page, f"{item} > .scored") == word_scores(explanation, "second_text")
        assert shown_scores(page, f"{item} .with-query") == word_scores(explanation, "text")
        sums = sums_of(explanation, **RANKED_SOURCES)
        terms = [f"{signed(value)} {name}" for name, value in sums.items()]
        shown = page.texts(f"{item} > .sum .term")
        assert shown[1:-1] == terms[1:]
        assert shown[0] == f"{plain(sums['query'])} query"
        assert shown[-1] == f"= {plain(explanation.target_value)} the logit"


def test_words_and_tokens_of_the_texts_are_shown(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", QUERY, "Füße & naïveté 🙂\nIt rained.")
    shown = {" ".join(text.split()) for text in page.tab.locator(".ranking .scored").all_text_contents()}
    assert shown == {QUERY, "Füße & naïveté 🙂", "It rained."}
    words = page.tab.locator(".ranking .chip").count()
    page.press("Tokens")
    assert page.tab.locator(".ranking .chip").count() > words
    assert page.tab.get_by_role("button", name="Tokens").get_attribute("aria-pressed") == "true"


def test_selected_word_shows_its_number(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", QUERY, "\n".join(DOCUMENTS))
    _, explanation = ranked(reranker)[0]
    page.tab.locator(".ranking .chip").first.click()
    page.tab.keyboard.press("ArrowRight")
    page.tab.mouse.move(0, 0)
    score = word_scores(explanation, "second_text")[1]
    assert page.text(".ranking li:first-child > .about").endswith(f" {score}")


def test_two_documents_are_compared_by_source_and_by_word_of_the_query(
    reranker: Head, open_url: Open
) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", QUERY, "\n".join(DOCUMENTS))
    expected = ranked(reranker)
    page.tab.get_by_label("Compared with").select_option(index=2)
    for first, second in ((0, 2), (2, 0)):
        (a, of_a), (b, of_b) = expected[first], expected[second]
        total = of_a.target_value - of_b.target_value
        relation = "lower" if total < 0 else "higher"
        difference = f"is {abs(total):.3f} {relation} than that of document {b.index + 1}."
        assert page.text(".contrast .lead") == f"The logit of document {a.index + 1} {difference}"
        sums = [sums_of(explanation, **RANKED_SOURCES) for explanation in (of_a, of_b)]
        by_source = bars(page, 0)
        assert by_source.pop("sum") == plain(total)
        assert by_source == {name: signed(sums[0][name] - sums[1][name]) for name in sums[0]}
        assert bars(page, 1)["sum"] == plain(sums[0]["query"] - sums[1]["query"])
        titles = page.tab.locator(".contrast .chip").evaluate_all("all => all.map((chip) => chip.title)")
        words = [word_scores(explanation, "text") for explanation in (of_a, of_b)]
        assert [title.partition(" (")[2] for title in titles] == [
            f"{one} for document {a.index + 1}, {other} for document {b.index + 1})"
            for one, other in zip(*words, strict=True)
        ]
        page.tab.get_by_label("Document", exact=True).select_option(index=2)  # exchanges both


def test_ranking_can_be_shared_and_navigated_back_to(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", QUERY, "\n".join(DOCUMENTS))
    page.tab.get_by_label("Compared with").select_option(index=2)
    page.wait("location.hash.includes('first=0&second=2')")
    shared = open_url(page.tab.url, ready=RANKED)
    assert shared.tab.get_by_label("Compared with").input_value() == "2"
    assert shared.tab.locator("textarea").nth(1).input_value() == "\n".join(DOCUMENTS)
    assert shared.texts(".ranking h3") == page.texts(".ranking h3")
    page.tab.go_back()
    page.wait(f"!{RANKED}")
    assert page.tab.url == reranker.url


def test_examples_of_a_reranker_are_ranked(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    for example in page.tab.locator(".example").all():
        example.click()
        page.wait("document.querySelector('.live .status').textContent !== 'Computing…'")
        documents = page.tab.locator("textarea").nth(1).input_value().split("\n")
        assert page.tab.locator(".ranking > li").count() == len(documents) >= 3
    assert page.tab.title() == f"{page.tab.locator('textarea').first.input_value()} - reranker"


def test_enter_starts_a_line_of_documents_and_control_enter_submits(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    page.tab.locator("textarea").first.fill(QUERY)
    page.tab.get_by_label("Documents", exact=True).focus()
    page.tab.keyboard.type("It rained.")
    page.tab.keyboard.press("Enter")
    page.tab.keyboard.type("Jane Austen wrote Emma.")
    assert page.tab.locator(".ranking").count() == 0
    page.tab.keyboard.press("Control+Enter")
    page.wait(RANKED)
    assert page.tab.locator(".ranking > li").count() == 2


INVALID = [
    (("", "It rained."), 0, "The query is empty: enter a query.", 0),
    ((QUERY, " \n "), 1, "The documents are empty: enter at least one.", 0),
    (("word " * 40, "It rained."), 0, "The query has 83 tokens, but the limit is 33: shorten it", 1),
    ((QUERY, "It rained.\n" + "x" * 200_000), 1, "Document 2 has 200000 bytes", 1),
]


def test_errors_are_shown_at_their_fields_and_keep_the_last_ranking(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", QUERY, "It rained.")
    for texts, field, message, num_problems in INVALID:
        send(page, "Rank", *texts)
        area = page.tab.locator("textarea").nth(field)
        errors = page.texts(".live .error")
        assert errors[field].startswith(message), errors
        assert errors[1 - field] == ""
        assert area.get_attribute("aria-invalid") == "true"
        assert area.evaluate("area => area === document.activeElement")
        assert page.tab.locator(".ranking > li").count() == 1
        assert len(page.problems) == num_problems, message  # the browser logs status 400
        page.problems.clear()


def test_truncated_document_is_marked(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", QUERY, "word " * 60 + "\nIt rained.")
    notes = [text for text in page.texts(".ranking .about") if "was truncated" in text]
    assert len(notes) == 1


def test_hostile_texts_are_displayed_as_text(reranker: Head, topics: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", HOSTILE, f"{HOSTILE}\n\u200b\u200d")
    assert page.tab.locator("img").count() == 0
    assert page.text(".title") == HOSTILE
    other = open_url(topics.url)
    classify(other, HOSTILE)
    assert other.tab.locator("img").count() == 0


def test_server_without_explanations_shows_only_scores(
    classifier_bundle: Callable[[str], Path], open_url: Open
) -> None:
    with head_server(classifier_bundle("reranker"), "--no-explain") as head:
        page = open_url(head.url)
        assert "does not compute contributions" in page.text(".about-model .lead")
        send(page, "Rank", QUERY, "\n".join(DOCUMENTS))
        order = [result.document for result in head.client.rerank(QUERY, DOCUMENTS)]
        assert page.texts(".ranking .document") == order
        assert page.tab.locator(".contrast, .chip").count() == 0
        assert page.violations() == []


def test_key_is_sent_under_the_prefix_of_an_application(
    classifier_bundle: Callable[[str], Path], open_url: Open
) -> None:
    with Mounted(classifier_bundle("reranker")) as mounted:
        page = open_url(f"http://127.0.0.1:{mounted.port}{PREFIX}/")
        send(page, "Rank", QUERY, "It rained.")
        assert page.text(".field .error:not([hidden])") == "This server needs a key."
        assert len(page.problems) == 1  # the browser logs status 401
        page.problems.clear()
        page.tab.get_by_label("Key", exact=True).fill("other")
        page.tab.keyboard.press("Enter")
        page.wait(RANKED)
        page.close()


# --- Classifiers ----------------------------------------------------------------------------------


def test_labels_have_scores_and_the_first_is_explained(topics: Head, open_url: Open) -> None:
    page = open_url(topics.url)
    classify(page, FIRST)
    result = topics.client.classify([FIRST])
    order = result.logits[0].argsort()[::-1]
    rows = [
        f"{result.labels[at]} {result.scores[0, at]:.4f} {plain(float(result.logits[0, at]))}" for at in order
    ]
    assert page.texts(".label-scores tbody tr") == rows
    label = result.labels[order[0]]
    [explanation] = topics.client.explain([FIRST], label=label, level="words")
    assert shown_scores(page, ".scored") == word_scores(explanation, "text")
    assert page.text(".term.total") == f"= {plain(explanation.target_value)} the logit of {label}"


def test_other_label_is_explained_rather_than_another(topics: Head, open_url: Open) -> None:
    page = open_url(topics.url)
    classify(page, FIRST)
    page.press("sea")
    wait_for_explanation(page)
    assert page.text(".term.total").endswith(" the logit of sea")
    assert page.tab.get_by_label("Label", exact=True).input_value() == "2"
    page.tab.get_by_label("Rather than").select_option("law")
    page.wait("document.querySelector('.term.total').textContent.includes('minus')")
    [explanation] = topics.client.explain([FIRST], label="sea", rather_than="law", level="words")
    assert shown_scores(page, ".scored") == word_scores(explanation, "text")
    total = plain(explanation.target_value)
    assert page.text(".term.total") == f"= {total} the logit of sea minus that of law"
    assert bars(page, 0)["sum"] == total
    page.wait("location.hash.includes('label=2&rather_than=1')")
    shared = open_url(page.tab.url, ready=EXPLAINED)
    assert shared.text(".term.total") == page.text(".term.total")
    page.press("law")  # not compared with itself
    page.wait("!location.hash.includes('rather_than')")
    assert page.tab.get_by_label("Rather than").input_value() == "-1"


def test_pair_is_classified_as_one_input(topics: Head, open_url: Open) -> None:
    page = open_url(topics.url)
    classify(page, FIRST, SECOND)
    result = topics.client.classify([(FIRST, SECOND)])
    [(label, score)] = result.top(1)[0]
    assert page.text(".label-scores tbody tr").startswith(f"{label} {score:.4f} ")
    [explanation] = topics.client.explain([(FIRST, SECOND)], label=label, level="words")
    shown = [shown_scores(page, f".scored[data-source={source}]") for source in ("text", "second_text")]
    assert shown == [word_scores(explanation, source) for source in ("text", "second_text")]


def test_text_that_cannot_be_classified_is_reported_at_its_field(topics: Head, open_url: Open) -> None:
    page = open_url(topics.url)
    invalid = [
        ((), "The text is empty: enter a text."),
        (("word " * 40,), "The text has 82 tokens, but the limit is 34: shorten it."),
        (("word " * 20, "word " * 20), "The pair of texts has 83 tokens, but the limit is 34: shorten it."),
    ]
    for texts, message in invalid:
        send(page, "Classify", *texts)
        assert page.texts(".live .error") == [message, ""]
    assert len(page.problems) == 2  # the browser logs status 400
    page.problems.clear()


def test_failed_explanation_is_reported_below_the_labels(topics: Head, open_url: Open) -> None:
    page = open_url(topics.url)
    page.tab.route("**/explain", lambda route: route.fulfill(status=400, json={"error": "no", "reason": "X"}))
    send(page, "Classify", FIRST)
    page.wait("document.querySelector('.label-reasons .status').textContent === 'No.'")
    assert len(page.texts(".label-scores tbody tr")) == 3
    assert page.tab.locator(".term").count() == 0
    page.problems.clear()


# --- Accessibility and layout ---------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_reports_no_violations(reranker: Head, topics: Head, open_url: Open, scheme: str) -> None:
    ranking = open_url(reranker.url, color_scheme=scheme)
    assert ranking.violations() == []
    send(ranking, "Rank", QUERY, "\n".join(DOCUMENTS))
    assert ranking.violations() == []
    send(ranking, "Rank", "", "")
    assert ranking.violations() == []
    labels = open_url(topics.url, color_scheme=scheme)
    assert labels.violations() == []
    classify(labels, FIRST, SECOND)
    assert labels.violations() == []


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_do_not_overflow_horizontally(reranker: Head, topics: Head, open_url: Open, width: int) -> None:
    long = "x" * 500
    ranking = open_url(reranker.url, width=width)
    send(ranking, "Rank", f"{QUERY} {long}", "\n".join([*DOCUMENTS, long]))
    labels = open_url(topics.url, width=width)
    classify(labels, f"{FIRST} {long}")
    for page in (ranking, labels):
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width
        for scale in page.tab.locator(".ticks").all():
            boxes = [box for tick in scale.locator("span").all() if (box := tick.bounding_box())]
            edges = [(box["x"], box["x"] + box["width"]) for box in boxes]
            assert all(right + 6 <= left for (_, right), (left, _) in pairwise(edges))


def test_tab_key_does_not_stop_at_every_word(reranker: Head, open_url: Open) -> None:
    page = open_url(reranker.url)
    send(page, "Rank", QUERY, "\n".join(DOCUMENTS))
    stops = page.tab.locator(".ranking [tabindex='0']").count()
    assert stops == 2 * len(DOCUMENTS)  # a document and the query
