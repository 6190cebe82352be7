"""The lesson on MiniLM: its figures, its three forms, and what it is asked."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from attnlens_analysis.errors import TextError, UnknownHeadError, UnknownTokenError
from attnlens_analysis.teach import Question, ask, make_lesson
from attnlens_analysis.teach.content import Bars, Lesson
from attnlens_analysis.teach.render import as_html, as_markdown, as_text

pytest.importorskip("onnx")  # of the extra `export`

SENTENCE = "The animal didn't cross the street because it was too tired."
HOSTILE = "</script><img src=x onerror=alert(1)> `|* \x1b[31m ``` <b>it</b> &amp; é東"


@pytest.fixture(scope="module")
def question(minilm_bundle: Path) -> Question:
    return ask(minilm_bundle, SENTENCE, "it", layer=3, head=1, lengths=(16, 32))


@pytest.fixture(scope="module")
def lesson(question: Question) -> Lesson:
    return make_lesson(question, "attnlens teach DIR TEXT --token it")


@pytest.fixture(scope="module")
def hostile(minilm_bundle: Path) -> Lesson:
    question = ask(minilm_bundle, HOSTILE, "it", layer=0, head=0)
    return make_lesson(question, "attnlens teach")


def words(lesson: Lesson, place: int) -> str:
    """Everything that step `place`, from 1, says."""
    step = lesson.steps[place - 1]
    cells = [cell for row in step.table.rows for cell in row] if step.table else []
    return " ".join([*step.text, *cells])


def test_punctuation_is_no_piece_of_a_word(lesson: Lesson) -> None:
    picture = lesson.steps[0].picture
    assert isinstance(picture, Bars)
    pieces = dict(zip(picture.labels, picture.values, strict=True))
    assert (pieces["tired"], pieces["."], pieces["didn't"]) == (1, 1, 3)


def test_nobody_in_layer_0_is_sent_there(lesson: Lesson, hostile: Lesson) -> None:
    assert "--layer 0" in lesson.steps[1].to_try[0]
    assert "--layer 0" not in hostile.steps[1].to_try[0]


# Computed apart, by PyTorch in float64. The place of the step, then what it says.
FIGURES = {
    1: ["16 tokens", "didn't (3)"],
    2: ["10.8948", "0.3267, 0.0042, 0.2931, 0.0348"],
    3: ["2.3926, -0.9218, 2.7825, 0.2949", "|q| is 8.6310"],
    4: ["animal 21.6876, [CLS] 10.9605, it 8.3842, street 6.9735, the 6.2610, … t -18.0113"],
    5: [
        "0.176777 = 1 / sqrt(32)",
        "animal 3.8339, [CLS] 1.9376, it 1.4821, street 1.2328, the 1.1068",
        "entropy, nats 1.2638 2.9",
        "e-04 1.5937 0.2266 largest weight 0.6768 1.0000 0.5269 0.9177",
        "e-05 0.6129 0.1169",
        "trace of the Jacobian 0.5223 4.8",
    ],
    6: ["animal 0.6768, [CLS] 0.1016, it 0.0644, street 0.0502", "sum to 1.0000", "1.263785 nats"],
    7: ["“[CLS]” gets the weight 0.1016, but its |v| is 0.20", "3.1843"],
    8: ["|output| is 6.2378 beside |x| = 10.8948", "12 heads x 32 = 384", "0.8476"],
    9: ["layer 3, head 1: 0.6768", "36 of 72 heads “it” gives “animal” more than “street”"],
    10: ["8.0 % of the rows", "be in 6.3 %", "largest in 90.6 %"],
    11: ["16 74", "32 295"],
}


@pytest.mark.parametrize("place", FIGURES)
def test_the_figures_of_minilm(lesson: Lesson, place: int) -> None:
    for figure in FIGURES[place]:
        assert figure in words(lesson, place)


def test_shares_of_what_is_brought(question: Question, lesson: Lesson) -> None:
    lengths = np.linalg.norm(question.values.value[1], axis=-1)
    assert 2.7 - 0.05 <= np.delete(lengths, 0).min() <= lengths.max() <= 4.3 + 0.05
    rows = {row[0]: row for row in lesson.steps[6].table.rows}  # type: ignore[union-attr]
    assert rows["animal"][-1][:5] == "0.783"
    assert rows["[CLS]"][-1] == "0.0055"


def test_without_a_scale_almost_all_goes_to_one_token(question: Question) -> None:
    assert question.values.weights_without_scale[1, question.row].max() == pytest.approx(0.99998, abs=5e-6)


def test_another_end_of_the_sentence_changes_one_head_in_all(minilm_bundle: Path) -> None:
    wide = ask(minilm_bundle, SENTENCE.replace("tired", "wide"), "it", target="animal", rival="street")
    more = sum(
        int((values.weights[:, wide.row, wide.target] > values.weights[:, wide.row, wide.rival]).sum())
        for values in wide.layers.values()
    )
    assert more == 37


def test_the_default_head_is_the_one_that_gives_the_target_most(minilm_bundle: Path) -> None:
    asked = ask(minilm_bundle, SENTENCE, "it", target="animal")
    assert (asked.layer, asked.head) == (3, 1)
    chosen = ask(minilm_bundle, SENTENCE, "10")
    best = chosen.values.weights[chosen.head, chosen.row]
    far = [place for place in range(1, 15) if abs(place - 10) > 1]
    everywhere = np.stack([values.weights[:, 10, far] for values in chosen.layers.values()])
    assert best[far].max() == everywhere.max()
    assert chosen.label(chosen.target) not in {"[CLS]", "[SEP]", "it"}


def test_negative_numbers_count_from_the_end(minilm_bundle: Path) -> None:
    asked = ask(minilm_bundle, SENTENCE, "-6", layer=-1, head=-2)
    assert (asked.layer, asked.head, asked.row) == (5, 10, 10)
    np.testing.assert_array_equal(asked.leaving, asked.final)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token": "dog"}, UnknownTokenError, "no token or word 'dog' among: \\[CLS\\] the"),
        ({"token": "the"}, UnknownTokenError, "the stands at 1, 7: give one of these numbers"),
        ({"token": "16"}, UnknownTokenError, "no token"),
        ({"layer": 6}, UnknownHeadError, "no layer 6: give 0 to 5, or -6 to -1"),
        ({"head": -13}, UnknownHeadError, "no head -13: give 0 to 11, or -12 to -1"),
        ({"rival": "dog"}, UnknownTokenError, "no token or word 'dog'"),
        ({"text": "word " * 300}, TextError, "TEXT has 302 tokens, not 1 to 256"),
        ({"text": "it"}, None, ""),
        ({"text": "", "token": "[CLS]"}, UnknownTokenError, "no token beside that one"),
    ],
)
def test_what_can_not_be_asked(
    minilm_bundle: Path, change: dict[str, object], error: type[Exception] | None, message: str
) -> None:
    given = {"text": SENTENCE, "token": "it", **change}
    if error is None:
        error, message = UnknownTokenError, "no token beside that one"
    with pytest.raises(error, match=message):
        ask(minilm_bundle, **given)  # type: ignore[arg-type]


def test_html_is_well_formed_and_loads_nothing(lesson: Lesson) -> None:
    page = as_html(lesson)
    root = ET.fromstring(page.partition("\n")[2])
    assert len(root.findall(".//{*}svg")) == len(lesson.steps) == 11
    assert not root.findall(".//{*}script")
    assert not re.search(r"\b(src|href)=", page)
    assert "default-src 'none'" in page
    assert "10.8948" in page


def test_a_hostile_text_stays_text(hostile: Lesson) -> None:
    page, markdown, text = as_html(hostile), as_markdown(hostile), as_text(hostile, 100)
    root = ET.fromstring(page.partition("\n")[2])
    assert not root.findall(".//{*}script") + root.findall(".//{*}img") + root.findall(".//{*}section//{*}i")
    for form in (page, markdown, text):
        assert "\x1b" not in form
    outside_code = re.sub(r"^(`{3,})\n.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    assert "onerror" in outside_code
    assert not re.search(r"(?<!\\)<", outside_code)
    assert not re.search(r"(?<!\\)&", outside_code)


def test_markdown_and_text_hold_every_step(lesson: Lesson) -> None:
    markdown, text = as_markdown(lesson), as_text(lesson, 80)
    for place, step in enumerate(lesson.steps, 1):
        assert f"## {place}. " in markdown
        assert f"\n{place}. {step.title}\n" in text
        assert step.picture.title in text
    assert markdown.count("**Try:**") == text.count("\nTry: ") == len(lesson.steps)
    assert "| animal | 0.6768 |" in markdown
    assert max(len(line) for line in text.split("\n") if "," not in line) <= 120
