"""Lessons on MiniLM: numbers, output formats and arguments."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from attnlens_analysis.errors import TextError, UnknownHeadError, UnknownTokenError
from attnlens_analysis.teach import HeadTrace, make_lesson, trace_head
from attnlens_analysis.teach.content import Bars, Lesson, Step
from attnlens_analysis.teach.render import as_html, as_markdown, as_text

pytest.importorskip("onnx")  # optional dependency

SENTENCE = "The animal didn't cross the street because it was too tired."
HOSTILE = "</script><img src=x onerror=alert(1)> `|* \x1b[31m ``` <b>it</b> &amp; é東"


@pytest.fixture(scope="module")
def trace(minilm_bundle: Path) -> HeadTrace:
    return trace_head(minilm_bundle, SENTENCE, "it", layer=3, head=1, lengths=(16, 32))


@pytest.fixture(scope="module")
def lesson(trace: HeadTrace) -> Lesson:
    return make_lesson(trace, "attnlens teach DIR TEXT --token it")


@pytest.fixture(scope="module")
def hostile(minilm_bundle: Path) -> Lesson:
    trace = trace_head(minilm_bundle, HOSTILE, "it", layer=0, head=0)
    return make_lesson(trace, "attnlens teach")


def step(lesson: Lesson, key: str) -> Step:
    """Return the step with this key."""
    return next(each for each in lesson.steps if each.key == key)


def words(lesson: Lesson, key: str) -> str:
    """Return the text and table cells of a step."""
    found = step(lesson, key)
    cells = [cell for row in found.table.rows for cell in row] if found.table else []
    return " ".join([*found.text, *cells])


def test_punctuation_is_counted_separately_from_words(lesson: Lesson) -> None:
    picture = step(lesson, "tokens").picture
    assert isinstance(picture, Bars)
    counts = dict(zip(picture.labels, picture.values, strict=True))
    assert (counts["tired"], counts["."], counts["didn't"]) == (1, 1, 3)


def test_layer_0_is_not_suggested_in_layer_0(lesson: Lesson, hostile: Lesson) -> None:
    assert "--layer 0" in step(lesson, "input").to_try[0]
    assert "--layer 0" not in step(hostile, "input").to_try[0]


# Computed independently with PyTorch in float64, by step.
FIGURES = {
    "tokens": ["16 tokens", "didn't (3)"],
    "input": ["10.8948", "0.3267, 0.0042, 0.2931, 0.0348"],
    "projections": ["2.3926, -0.9218, 2.7825, 0.2949", "|q| is 8.6310"],
    "scores": ["animal 21.6876, [CLS] 10.9605, it 8.3842, street 6.9735, the 6.2610, … t -18.0113"],
    "scale": [
        "0.176777 = 1 / sqrt(32)",
        "animal 3.8339, [CLS] 1.9376, it 1.4821, street 1.2328, the 1.1068",
        "entropy, nats 1.2638 2.9",
        "e-04 1.5937 0.2266 largest weight 0.6768 1.0000 0.5269 0.9177",
        "e-05 0.6129 0.1169",
        "trace of the Jacobian 0.5223 4.8",
    ],
    "softmax": ["animal 0.6768, [CLS] 0.1016, it 0.0644, street 0.0502", "sum to 1.0000", "1.263785 nats"],
    "values": ["“[CLS]” has the weight 0.1016, but its |v| is 0.20", "3.1843"],
    "output": [
        "|output| is 6.2378; the vector that it is added to has the norm 10.8948",
        "12 heads x 32 = 384",
        "0.8476",
    ],
    "agreement": [
        "layer 3, head 1: 0.6768",
        "36 of 72 heads, “it” attends more to “animal” than to “street”",
    ],
    "diagonal": ["8.0 % of the rows", "be 6.3 %", "be 90.6 %"],
    "cost": ["16 74", "32 295"],
}


@pytest.mark.parametrize("key", FIGURES)
def test_numbers_match_pytorch(lesson: Lesson, key: str) -> None:
    for figure in FIGURES[key]:
        assert figure in words(lesson, key)


def test_shares_of_the_values(trace: HeadTrace, lesson: Lesson) -> None:
    lengths = np.linalg.norm(trace.values.value[1], axis=-1)
    assert 2.7 - 0.05 <= np.delete(lengths, 0).min() <= lengths.max() <= 4.3 + 0.05
    rows = {row[0]: row for row in step(lesson, "values").table.rows}  # type: ignore[union-attr]
    assert rows["animal"][-1][:5] == "0.783"
    assert rows["[CLS]"][-1] == "0.0055"


def test_without_a_scale_almost_all_weight_is_on_one_token(trace: HeadTrace) -> None:
    assert trace.values.weights_without_scale[1, trace.row].max() == pytest.approx(0.99998, abs=5e-6)


def test_changing_the_last_word_changes_only_one_head(minilm_bundle: Path) -> None:
    wide = trace_head(minilm_bundle, SENTENCE.replace("tired", "wide"), "it", target="animal", rival="street")
    more = sum(
        int((values.weights[:, wide.row, wide.target] > values.weights[:, wide.row, wide.rival]).sum())
        for values in wide.layers.values()
    )
    assert more == 37


def test_default_head_has_the_largest_weight_on_the_target(minilm_bundle: Path) -> None:
    trace = trace_head(minilm_bundle, SENTENCE, "it", target="animal")
    assert (trace.layer, trace.head) == (3, 1)
    default = trace_head(minilm_bundle, SENTENCE, "10")
    best = default.values.weights[default.head, default.row]
    far = [index for index in range(1, 15) if abs(index - 10) > 1]
    everywhere = np.stack([values.weights[:, 10, far] for values in default.layers.values()])
    assert best[far].max() == everywhere.max()
    assert default.label(default.target) not in {"[CLS]", "[SEP]", "it"}


def test_negative_indices_count_from_the_end(minilm_bundle: Path) -> None:
    trace = trace_head(minilm_bundle, SENTENCE, "-6", layer=-1, head=-2)
    assert (trace.layer, trace.head, trace.row) == (5, 10, 10)
    np.testing.assert_array_equal(trace.leaving, trace.final)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token": "dog"}, UnknownTokenError, "no token or word 'dog' in: \\[CLS\\] the"),
        ({"token": "the"}, UnknownTokenError, "'the' is ambiguous. Use one of the token indices 1, 7"),
        ({"token": "16"}, UnknownTokenError, "no token"),
        ({"layer": 6}, UnknownHeadError, "layer 6 does not exist. Use 0 to 5, or -6 to -1"),
        ({"head": -13}, UnknownHeadError, "head -13 does not exist. Use 0 to 11, or -12 to -1"),
        ({"rival": "dog"}, UnknownTokenError, "no token or word 'dog'"),
        ({"text": "word " * 300}, TextError, "TEXT has 302 tokens, but must have 1 to 256"),
        ({"text": "it"}, None, ""),
        ({"text": "", "token": "[CLS]"}, UnknownTokenError, "no other token"),
    ],
)
def test_invalid_arguments_are_rejected(
    minilm_bundle: Path, change: dict[str, object], error: type[Exception] | None, message: str
) -> None:
    arguments = {"text": SENTENCE, "token": "it", **change}
    if error is None:
        error, message = UnknownTokenError, "no other token"
    with pytest.raises(error, match=message):
        trace_head(minilm_bundle, **arguments)  # type: ignore[arg-type]


def test_html_is_well_formed_and_self_contained(lesson: Lesson) -> None:
    page = as_html(lesson)
    root = ET.fromstring(page.partition("\n")[2])
    assert len(root.findall(".//{*}svg")) == len(lesson.steps) == 20
    assert not root.findall(".//{*}script")
    assert not re.search(r"\b(src|href)=", page)
    assert "default-src 'none'" in page
    assert "10.8948" in page


def test_hostile_text_is_escaped(hostile: Lesson) -> None:
    page, markdown, text = as_html(hostile), as_markdown(hostile), as_text(hostile, 100)
    root = ET.fromstring(page.partition("\n")[2])
    assert not root.findall(".//{*}script") + root.findall(".//{*}img") + root.findall(".//{*}section//{*}i")
    for form in (page, markdown, text):
        assert "\x1b" not in form
    outside_code = re.sub(r"^(`{3,})\n.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    assert "onerror" in outside_code
    assert not re.search(r"(?<!\\)<", outside_code)
    assert not re.search(r"(?<!\\)&", outside_code)


def test_markdown_and_text_contain_every_step(lesson: Lesson) -> None:
    markdown, text = as_markdown(lesson), as_text(lesson, 80)
    for number, step in enumerate(lesson.steps, 1):
        assert f"## {number}. " in markdown
        assert f"\n{number}. {step.title}\n" in text
        assert step.picture.title in text
        assert step.explanation[:60] in text
    assert len({step.key for step in lesson.steps}) == len(lesson.steps)
    assert markdown.count("**Try:**") == text.count("\nTry: ") == len(lesson.steps)
    assert "| animal | 0.6768 |" in markdown
    assert max(len(line) for line in text.split("\n") if "," not in line) <= 120
