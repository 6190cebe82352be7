"""Attention maps in all layouts, batching, and bundles without optional parts."""

from pathlib import Path

import numpy as np
import pytest

from attnlens.patterns import Band, BlockTable
from attnlens_analysis.heads import TooShortError, measure_heads, read_texts
from attnlens_analysis.heads.maps import MapSource, batches, dense_weights
from attnlens_server.bundle import Layout, Output, OutputRole, RowSum, open_bundle
from stored_bundle import STORED_BUNDLE

ROLE = OutputRole.ATTENTION_WEIGHTS


def test_padding_is_removed_from_dense_weights() -> None:
    output = Output("attentions.0", ROLE, Layout.DENSE, layer=0, num_heads=2, row_sum=RowSum.ONE)
    batch = np.random.default_rng(0).random((2, 7, 7), dtype=np.float32)
    assert np.array_equal(dense_weights(batch, output, 5), batch[:, :5, :5])


def test_bands_are_converted_to_dense_weights() -> None:
    band = Band(window_radius=1, num_global_tokens=1)
    output = Output("attentions.0", ROLE, Layout.BAND, 0, num_heads=1, row_sum=RowSum.ONE, pattern=band)
    rows = np.zeros((1, 6, band.width), dtype=np.float32)  # 1 global column, window of 3, 1 extra column
    rows[0, 1:4] = [0.4, 0.1, 0.2, 0.3, 0.25]
    rows[0, 0, 4] = 0.25
    weights = dense_weights(rows, output, 4)
    assert weights.shape == (1, 4, 4)
    assert weights[0, 2].tolist() == pytest.approx([0.4, 0.1, 0.2, 0.3])
    assert weights[0, 0].tolist() == [0.25] * 4


def test_blocks_are_converted_to_dense_weights() -> None:
    table = BlockTable(2, 3, np.zeros((1, 0, 0), dtype=np.int32))
    output = Output("attentions.0", ROLE, Layout.BLOCKS, 0, num_heads=1, row_sum=RowSum.ONE, pattern=table)
    rows = np.zeros((1, 8, table.width), dtype=np.float32)
    rows[0, :, :5] = [0.1, 0.2, 0.3, 0.25, 0.15]
    weights = dense_weights(rows, output, 5)  # three blocks, the last half full, with full attention
    np.testing.assert_allclose(weights, [[[0.1, 0.2, 0.3, 0.25, 0.15]] * 5])


def test_rows_that_sum_to_a_gate_are_divided_by_it() -> None:
    output = Output("attentions.0", ROLE, Layout.DENSE, layer=0, num_heads=1, row_sum=RowSum.GATE)
    weights = dense_weights(np.array([[[0.1, 0.3], [0, 0]]], dtype=np.float32), output, 2)
    assert weights[0].tolist() == [pytest.approx([0.25, 0.75]), [0, 0]]


def test_texts_are_batched_by_similar_length() -> None:
    lengths = [int(length) for length in np.random.default_rng(2).integers(3, 400, 300)]
    made = list(batches(lengths, num_heads=72))
    assert sorted(number for batch in made for number in batch) == list(range(300))
    in_order = [lengths[number] for batch in made for number in batch]
    assert in_order == sorted(in_order)
    assert all(len(batch) * max(lengths[number] for number in batch) <= 2048 for batch in made)
    assert list(batches([100_000], 72)) == [[0]]


def test_weights_do_not_depend_on_the_batch(minilm_bundle: Path) -> None:
    source = MapSource(open_bundle(minilm_bundle), threads=1)
    texts = [text for text in source.encode(["It rained.", "So it was wet, and nobody came."]) if text]
    together = dict(source.of_texts(texts))
    for number, text in enumerate(texts):
        [alone] = source.of_ids([text.input_ids])
        np.testing.assert_allclose(together[number].weights, alone, atol=1e-5)
        np.testing.assert_allclose(alone.sum(axis=-1), 1, atol=1e-5)
        assert together[number].content.tolist() == list(range(1, len(text.input_ids) - 1))


def test_bundles_without_contributions_graph_have_no_head_importance(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("it rained so it was wet\n" * 3 + "and nobody came but it rained\n", encoding="utf-8")
    report = measure_heads(open_bundle(STORED_BUNDLE), read_texts(path), lambda *_: None)
    assert (report.importance, report.task, report.syntax) == (None, None, None)
    assert any(note.startswith("Head importance was not measured") for note in report.notes)
    assert report.patterns.num_texts == 4
    assert report.tied is not None
    path.write_text("a\n", encoding="utf-8")
    with pytest.raises(TooShortError, match=r"no text of texts\.txt has at least 8 tokens"):
        measure_heads(open_bundle(STORED_BUNDLE), read_texts(path), lambda *_: None)
