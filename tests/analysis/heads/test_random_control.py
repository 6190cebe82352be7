"""Control experiment: heads of a model with shuffled weights get no labels of learned behavior."""

from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from attnlens_analysis.heads import HeadReport, measure_heads, shipped_treebank
from attnlens_analysis.heads.labels import CAVEATS, MIN_CONTENT
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_model import EncoderConfig
from attnlens_server.bundle import open_bundle
from small_bundles import TOKENIZERS
from tampered import EMBEDDINGS, copy_of, put_hashes_right

pytestmark = pytest.mark.extended  # uses all sentences


def shuffle_weights(path: Path, seed: int) -> None:
    """Shuffle the elements of all weight matrices of a graph in place.

    This affects the other graphs, which share the weights. Norms and biases are not changed.
    """
    generator = np.random.default_rng(seed)
    content = bytearray(path.read_bytes())
    for tensor in onnx.load(path).graph.initializer:
        matrix = numpy_helper.to_array(tensor)
        if matrix.ndim == 2 and matrix.dtype == np.float32:
            raw = matrix.tobytes()
            start = content.find(raw)
            assert start >= 0
            content[start : start + len(raw)] = generator.permutation(matrix.ravel()).tobytes()
    path.write_bytes(content)


@pytest.fixture(scope="module")
def report(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> HeadReport:
    bundle = copy_of(minilm_bundle, tmp_path_factory.mktemp("random"))
    shuffle_weights(bundle / EMBEDDINGS, seed=0)
    put_hashes_right(bundle)
    with mock.patch("attnlens_analysis.heads.tied.NUM_TEXTS", 1):  # not used in this test
        return measure_heads(
            open_bundle(bundle), shipped_treebank(), lambda *_: None, num_importance_texts=0, threads=1
        )


def test_heads_with_random_weights_get_no_label(report: HeadReport) -> None:
    assert len(report.heads) == 72
    assert report.labeled == ()
    assert (report.patterns.entropy_normalized > 0.9).sum() > 36  # see `CAVEATS`
    assert any("close to 1" in caveat for caveat in CAVEATS)


def test_heads_with_random_weights_do_not_beat_fixed_distances(report: HeadReport) -> None:
    assert report.syntax is not None
    scored = [score for score in report.syntax if score.num_scored >= 100]
    assert len(scored) >= 10
    assert [score.relation for score in scored if score.scored > score.offset_scored + 0.1] == []


def test_heads_with_random_weights_do_not_find_antecedents(report: HeadReport) -> None:
    assert report.coreference is not None
    for score in report.coreference.scores:
        assert score.num_scored >= 25
        assert score.scored < score.nearest_scored, score


def test_heads_with_random_weights_attend_to_all_distances_alike(report: HeadReport) -> None:
    assert report.distances is not None
    attends = report.distances.content > MIN_CONTENT
    assert attends.any()
    for share in (report.distances.local, report.distances.long_range):
        assert share.ratio[attends].max() < 1.2


def test_heads_with_random_weights_do_not_distinguish_related_words(report: HeadReport) -> None:
    assert report.relatedness is not None
    assert report.relatedness.num_items == 74
    assert report.relatedness.synonym.difference.max() < 0.02
    assert report.relatedness.synonym.interval[0].max() < 0.01


def test_heads_of_an_untrained_encoder_get_no_label(tmp_path: Path) -> None:
    config = EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": 96,
            "num_layers": 3,
            "embeddings": {"vocab_size": 400},
            "positions": {"max_position_embeddings": 256},
            "attention": {"kind": "softmax", "num_heads": 6},
            "feed_forward": {"intermediate_size": 192},
        }
    )
    tokenizer = TOKENIZERS / "wordpiece" / "tokenizer.json"
    export_bundle(config, tmp_path / "bundle", ExportOptions(grid=small_grid(16), tokenizer=tokenizer))
    bundle = open_bundle(tmp_path / "bundle")
    report = measure_heads(bundle, shipped_treebank(), lambda *_: None, num_importance_texts=0, threads=1)
    assert len(report.heads) == 18
    assert report.labeled == ()
