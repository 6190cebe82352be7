"""Head report of all-MiniLM-L6-v2 on the bundled treebank."""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import tokenizers

from attnlens_analysis.heads import Corpus, Head, HeadReport, measure_heads, shipped_treebank
from attnlens_analysis.heads.maps import MapSource
from attnlens_analysis.heads.tables import interval_tables
from attnlens_analysis.heads.tied import diagonal_wins, tied_graph
from attnlens_server.bundle import open_bundle

pytestmark = pytest.mark.extended  # slow; the command and the measures have separate tests

PAGE = Path(__file__).parents[3] / "docs" / "heads.md"
EXAMPLE = "The animal didn't cross the street because it was too tired."


def quiet(_stage: str, _done: int, _total: int) -> None:
    """Ignore progress."""


@pytest.fixture(scope="module")
def report(minilm_bundle: Path) -> HeadReport:
    with mock.patch("attnlens_analysis.heads.tied.NUM_TEXTS", 1):  # not used in this test
        return measure_heads(
            open_bundle(minilm_bundle), shipped_treebank(), quiet, num_importance_texts=6, threads=1
        )


def largest(report: HeadReport, name: str) -> tuple[str, float]:
    values = getattr(report.patterns, name)
    return str(report.heads[values.argmax()]), float(values.max())


def test_patterns_of_minilm(report: HeadReport) -> None:
    found = report.patterns
    assert (found.num_texts, found.num_rows) == (417, 8862)
    expected = {
        "previous": ("L0H2", 0.9995),
        "next": ("L1H8", 0.708),
        "first": ("L4H5", 0.751),
        "last": ("L3H11", 0.104),
        "self": ("L1H1", 0.174),
        "punctuation": ("L3H11", 0.326),
        "duplicate": ("L2H9", 0.372),
        "entropy_normalized": ("L0H7", 0.927),
    }
    for name, (head, value) in expected.items():
        found_head, found_value = largest(report, name)
        assert found_head == head, name
        assert abs(found_value - value) < 1e-3, name
    assert (found.previous > 0.5).sum() == (found.next > 0.5).sum() == 1
    assert (found.first > 0.5).sum() == 16


def test_minilm_has_copy_heads_but_no_induction_heads(report: HeadReport) -> None:
    assert report.copies is not None
    assert report.heads[report.copies.earlier_copy.argmax()] == Head(2, 9)
    assert report.copies.earlier_copy.max() > 0.5
    assert report.copies.induction.max() < 1.5 * report.copies.chance


def test_relations_of_minilm(report: HeadReport) -> None:
    assert report.syntax is not None
    found = {score.relation: score for score in report.syntax}
    assert sum(score.num_chosen + score.num_scored for score in (found["all"],)) == 6142
    assert (str(found["nsubj"].head), str(found["obj"].head)) == ("L2H8", "L2H0")
    for relation, offset in (("nsubj", 1), ("obj", -1)):
        assert found[relation].offset == offset
        assert found[relation].direction == "to_head"
        assert found[relation].scored > found[relation].offset_scored + 0.2
    labels = {label for head in report.labeled for label in head.labels}
    assert {"previous-token", "next-token", "first-token", "syntax:nsubj", "syntax:obj"} <= labels
    assert labels.isdisjoint({"induction", "self", "last-token", "syntax:compound"})


def test_minilm_follows_gender_and_number_but_not_meaning(report: HeadReport) -> None:
    assert report.coreference is not None
    found = {score.kind: score for score in report.coreference.scores}
    assert {kind: str(score.head) for kind, score in found.items()} == {
        "all": "L1H3",
        "gender": "L1H3",
        "number": "L3H1",
        "meaning": "L3H1",
    }
    assert found["gender"].scored == pytest.approx(57 / 60, abs=0.02)
    assert found["number"].scored == pytest.approx(43 / 54, abs=0.02)
    assert found["meaning"].interval[0] < found["meaning"].nearest_scored
    labels = {label for head in report.labeled for label in head.labels}
    assert {label for label in labels if label.startswith("coreference")} == {
        "coreference:gender",
        "coreference:number",
    }


def test_minilm_has_local_and_semantic_but_no_long_range_heads(report: HeadReport) -> None:
    labels = Counter(label for head in report.labeled for label in head.labels)
    assert (labels["local"], labels["long-range"], labels["semantic"]) == (18, 0, 15)


def test_page_shows_the_measured_tables(report: HeadReport) -> None:
    tables = list(interval_tables(report))
    assert [table.title for table in tables] == ["Pronouns", "Near and distant tokens", "Related words"]
    page = PAGE.read_text("utf-8")
    for table in tables:
        heading = f"| {' | '.join(table.headings)} |\n|{'---|' * len(table.headings)}\n"
        assert page.count(heading) == 1
        lines = page.split(heading)[1].splitlines()
        for row, line in zip(table.rows, lines, strict=False):
            shown = [cell.strip() for cell in line.strip("|").split("|")]
            assert (shown[:2], shown[-1]) == (list(row[:2]), row[-1])
            numbers, expected = (
                [float(number) for cell in cells[2:-1] for number in re.findall(r"\d+\.?\d*", cell)]
                for cells in (shown, row)
            )
            assert numbers == pytest.approx(expected, rel=0.01, abs=0.002)
        assert not lines[len(table.rows)]


def test_last_layer_has_the_largest_effect_on_the_embedding(report: HeadReport) -> None:
    assert report.importance is not None
    assert report.importance.num_texts == 6
    by_layer = report.importance.ablation.reshape(6, 12).mean(axis=1)
    assert by_layer[5] > 3 * by_layer[:5].max()
    assert report.importance.agreement > 0.7


def test_measurements_match_a_plain_implementation(minilm_bundle: Path) -> None:
    """Compare with a reimplementation in plain loops that processes one sentence at a time."""
    corpus = dataclasses.replace(shipped_treebank(), sentences=shipped_treebank().sentences[:40])
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    session = ort.InferenceSession(minilm_bundle / "onnx" / "model_attentions.onnx")
    sums, rows, entropy, hits, arcs = np.zeros((4, 72)), 0, np.zeros(72), np.zeros(72), 0
    for sentence in corpus.sentences:
        words = sentence.words or ()
        encoding = tokenizer.encode([word.form for word in words], is_pretokenized=True)
        maps = run(session, encoding.ids)
        if len(encoding) >= 8:
            for row in range(1, len(encoding) - 1):
                sums += maps[:, row, [row - 1, row + 1, 0, row]].T
                entropy -= (maps[:, row] * np.log(maps[:, row])).sum(axis=-1)
                rows += 1
        pieces = [[i for i, w in enumerate(encoding.word_ids) if w == word] for word in range(len(words))]
        for place, word in enumerate(words):
            if word.relation == "obj" and word.head is not None:
                given = [maps[:, pieces[place]][:, :, other].sum(axis=-1).mean(axis=-1) for other in pieces]
                given[place] = np.full(72, -1)
                hits += np.argmax(given, axis=0) == word.head
                arcs += 1
    with mock.patch("attnlens_analysis.heads.tied.NUM_TEXTS", 1):
        report = measure_heads(open_bundle(minilm_bundle), corpus, quiet, num_importance_texts=0, threads=1)
    found = report.patterns
    assert found.num_rows == rows
    assert np.abs(np.stack([found.previous, found.next, found.first, found.self]) - sums / rows).max() < 1e-4
    assert np.abs(found.entropy - entropy / rows).max() < 1e-4
    [score] = [score for score in report.syntax or () if score.relation == "obj"]
    assert score.num_chosen + score.num_scored == arcs
    together = score.chosen * score.num_chosen + score.scored * score.num_scored
    assert together == pytest.approx(hits[report.heads.index(score.head)])


def run(session: ort.InferenceSession, ids: list[int]) -> npt.NDArray[np.float64]:
    rows = np.array([ids])
    feed = {"input_ids": rows, "attention_mask": np.ones_like(rows), "token_type_ids": np.zeros_like(rows)}
    found = session.run([f"attentions.{layer}" for layer in range(6)], feed)
    return np.asarray(np.concatenate(found, axis=1)[0], dtype=np.float64)


def test_diagonal_dominates_only_with_tied_projections(minilm_bundle: Path) -> None:
    path = minilm_bundle / "onnx" / "model_attentions.onnx"
    source = MapSource(open_bundle(minilm_bundle), threads=1)
    [text] = source.encode([EXAMPLE])
    assert text is not None
    rows = np.arange(16)
    [own] = source.of_ids([text.input_ids])
    assert diagonal_wins(own, rows).mean() / 16 == pytest.approx(0.080, abs=5e-4)
    shares = []
    for layer in range(6):
        graph = tied_graph(path, layer)
        assert graph is not None
        (minilm_bundle / "onnx" / "tied.onnx").write_bytes(graph)
        session = ort.InferenceSession(minilm_bundle / "onnx" / "tied.onnx")
        [tied] = source.of_ids([text.input_ids], session)
        np.testing.assert_allclose(tied[: 12 * layer], own[: 12 * layer], atol=1e-5)
        shares.append(diagonal_wins(tied[12 * layer :][:12], rows).mean() / 16)
    (minilm_bundle / "onnx" / "tied.onnx").unlink()
    assert shares == pytest.approx([0.932, 0.974, 0.948, 0.875, 0.922, 0.786], abs=1e-3)
    assert np.mean(shares) == pytest.approx(0.906, abs=5e-4)


def test_plain_texts_have_patterns_but_no_syntax(minilm_bundle: Path) -> None:
    sentences = tuple(
        dataclasses.replace(sentence, words=None) for sentence in shipped_treebank().sentences[:20]
    )
    with_words = dataclasses.replace(shipped_treebank(), sentences=shipped_treebank().sentences[:20])
    bundle = open_bundle(minilm_bundle)
    with mock.patch("attnlens_analysis.heads.tied.NUM_TEXTS", 1):
        plain, tagged = (
            measure_heads(bundle, corpus, quiet, num_importance_texts=0, threads=1)
            for corpus in (Corpus("lines", "", sentences), with_words)
        )
    assert plain.syntax is None
    np.testing.assert_allclose(plain.patterns.previous, tagged.patterns.previous, atol=1e-6)
    assert plain.patterns.punctuation_share > 0
