"""Measurements of `check --faithfulness`, with MiniLM and computed by hand, and their storage in bundles."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from attnlens.bundle import BundleError, read_manifest, verify_files
from attnlens.explanations import ExplainMethod
from attnlens.v1 import explanation_pb2
from attnlens_cli.commands.bundles.check import check
from attnlens_cli.show.bundle import show_faithfulness
from attnlens_export.errors import SourceError
from attnlens_export.faithfulness import measure
from attnlens_export.faithfulness.measure import (
    Control,
    FaithfulnessResult,
    MethodResult,
    TokenizedText,
    measure_faithfulness,
    read_texts,
    record,
    tokenize,
)
from attnlens_export.faithfulness.model import ExplainedModel
from attnlens_model import read_config
from pages.blocks import blocks_of
from pages.shown import difference
from small_bundles import export_small

SENTENCE = "The animal didn't cross the street because it was too tired."
# Of tokens 1 to 14, by another program.
EFFECTS = [0.01477, 0.16094, 0.02793, 0.00359, 0.01509, 0.04965, 0.00622]
EFFECTS += [0.10288, 0.00725, 0.00387, 0.00353, 0.00903, 0.10590, 0.00499]


@pytest.fixture(scope="module")
def model(minilm_bundle: Path) -> ExplainedModel:
    config = read_config(minilm_bundle / "config.json")
    return ExplainedModel(minilm_bundle, read_manifest(minilm_bundle), config)


def test_effects_and_contributions_match_an_independent_program(
    minilm_bundle: Path, model: ExplainedModel
) -> None:
    text, *_ = tokenize(minilm_bundle, [SENTENCE] * 10, 256)
    whole, *others = model.embed(text.ids, [(), *((token,) for token in range(1, 15))])
    assert np.allclose(1 - np.stack(others) @ whole, EFFECTS, atol=2e-4)
    scores, baseline = model.contributions(text.ids)
    assert scores[2] == pytest.approx(0.28130, abs=2e-4)
    assert scores.sum() + baseline == pytest.approx(1, abs=1e-5)
    assert text.ranked.tolist() == list(range(1, 15))
    assert text.lengths[1:4].tolist() == [3, 6, 4]


@pytest.fixture(scope="module")
def of_minilm(minilm_bundle: Path) -> FaithfulnessResult:
    """Of the 30 sentences."""
    return measure_faithfulness(minilm_bundle)


@pytest.mark.extended
def test_pages_show_all_measurements(
    of_minilm: FaithfulnessResult, capsys: pytest.CaptureFixture[str]
) -> None:
    """In docs/bundle.md the table, in docs/explanations.md a figure of it."""
    show_faithfulness(of_minilm)
    [table] = [block.shown for block in blocks_of("docs/bundle.md") if "--faithfulness" in block.code]
    printed = capsys.readouterr().out
    assert "contributions" in printed
    assert difference(table, f"parity\n{printed}") == ""
    measured = {each.method: each.rank_correlation for each in of_minilm.methods}
    [told] = [block.shown for block in blocks_of("docs/explanations.md") if "--verify" in block.code]
    expected = measured[ExplainMethod.CONTRIBUTIONS]
    assert f"contributions: Spearman {expected:.2f} with leave-one-out, measured for" in told


def test_methods_of_minilm_have_the_documented_order(of_minilm: FaithfulnessResult) -> None:
    found = {measured.method: measured for measured in of_minilm.methods}
    assert found[ExplainMethod.LEAVE_ONE_OUT].rank_correlation == pytest.approx(1)
    contributions = found[ExplainMethod.CONTRIBUTIONS]
    assert 0.75 < contributions.rank_correlation < 0.95
    for other in (ExplainMethod.ROLLOUT, ExplainMethod.OUTPUT_SHARE, *Control):
        assert found[other].rank_correlation < contributions.rank_correlation - 0.1
        assert found[other].deletion_difference < contributions.deletion_difference
    assert [measured.method for measured in of_minilm.sorted()][:2] == [
        ExplainMethod.LEAVE_ONE_OUT,
        ExplainMethod.CONTRIBUTIONS,
    ]


class Weights:
    """Model whose embedding changes by the sum of the weights of masked tokens."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = np.array(weights)

    def embed(self, _ids: object, left_out: list[tuple[int, ...]], _types: object) -> np.ndarray:
        moved = np.array([self.weights[list(tokens)].sum() for tokens in left_out])
        return np.stack([1 - moved, np.zeros(len(moved))], axis=1)


def test_deletion_difference_by_hand() -> None:
    """Ten tokens weigh 0.01 to 0.10: the best 1 to 5 of them 0.10, 0.19 ..., the worst 0.01, 0.03 ..."""
    model = Weights([0.01 * (number + 1) for number in range(10)])
    text = TokenizedText(np.arange(10), np.arange(10), np.ones(10, dtype=np.int64))
    best = np.mean([0.10, 0.19, 0.27, 0.34, 0.40])
    worst = np.mean([0.01, 0.03, 0.06, 0.10, 0.15])
    whole = np.array([1.0, 0.0])
    rankings = [np.arange(10.0), -np.arange(10.0)]
    found = measure._deletion_differences(model, text, whole, rankings)  # type: ignore[arg-type]
    assert found == pytest.approx([best - worst, worst - best])


NAN = float("nan")
RESULT = FaithfulnessResult(
    "lines.txt",
    12,
    15.5,
    (
        MethodResult(Control.RANDOM, 0.01, -0.1, 0.12, 12, 0.02),
        MethodResult(ExplainMethod.CONTRIBUTIONS, 0.85, 0.83, 0.87, 11, 0.48),
        MethodResult(ExplainMethod.OUTPUT_SHARE, 0.5, 0.4, 0.6, 12, NAN),
        MethodResult(ExplainMethod.ROLLOUT, NAN, NAN, NAN, 0, 0.09),
    ),
)


def test_figures_go_into_manifest_and_report_once(minilm_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(minilm_bundle, tmp_path / "bundle")
    before, _, _ = (bundle / "parity" / "report.md").read_text("utf-8").partition("## Faithfulness")
    for _ in range(2):
        record(bundle, RESULT)
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    assert len(manifest.faithfulness) == 3  # the rank correlation of rollout is not known
    best, shares, _ = manifest.faithfulness
    assert (best.method, best.control) == (explanation_pb2.ExplainMethod.EXPLAIN_METHOD_CONTRIBUTIONS, "")
    assert {found.control for found in manifest.faithfulness} == {"", "random numbers"}
    assert (best.num_texts, best.interval_low, best.interval_high) == (11, 0.83, 0.87)
    assert np.isnan(shares.deletion_difference)
    page = (bundle / "parity" / "report.md").read_text(encoding="utf-8")
    assert page.startswith(before)
    assert page.count("## Faithfulness of explanations") == 1
    assert "| contributions | 0.850 | 0.830 to 0.870 | 11 | 0.480 |" in page
    assert "| output share | 0.500 | 0.400 to 0.600 | 12 |  |" in page
    assert "| rollout | undefined |  | 0 | 0.090 |" in page
    assert "undefined where all ranked tokens have the same score" in page
    assert "nan" not in page.partition("## Faithfulness")[2]
    report = json.loads((bundle / "parity" / "report.json").read_text(encoding="utf-8"))
    assert report["faithfulness"]["num_texts"] == 12
    assert report["passed"]


def test_interval_matches_a_bootstrap_over_texts() -> None:
    values = np.random.default_rng(1).normal(0.7, 0.1, 200)
    low, high = measure._confidence_interval(values)
    error = values.std(ddof=1) / np.sqrt(200)
    assert (low, high) == pytest.approx(
        (values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=error / 5
    )
    assert measure._confidence_interval(values) == (low, high)
    assert measure._confidence_interval(np.full(3, 0.5)) == (0.5, 0.5)
    assert np.isnan(measure._confidence_interval(values[:1])).all()


def test_export_measures_rank_correlations_and_bounds_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = export_small("wordpiece", tmp_path, faithfulness=True)
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    found = {each.control or str(each.method): each for each in manifest.faithfulness}
    assert found.keys() == {"1", "2", "3", "4", "5", *Control}
    for each in found.values():
        assert -1 <= each.interval_low <= each.rank_correlation <= each.interval_high <= 1
        assert (each.num_texts, np.isnan(each.deletion_difference)) == (30, True)
    assert found["3"].rank_correlation == 1
    assert "## Faithfulness of explanations" in (bundle / "parity" / "report.md").read_text("utf-8")

    texts = tokenize(bundle, read_texts(None), 34)
    weights = measure._num_weights(read_config(bundle / "config.json"))
    ten = sum(len(text.ranked) * len(text.ids) for text in texts[:10]) * weights
    monkeypatch.setattr(measure, "EXPORT_WORK", 2 * ten)
    result = measure.measure_at_export(bundle)
    assert result is not None
    assert 10 < result.num_texts < 30
    monkeypatch.setattr(measure, "EXPORT_WORK", 1)
    for limit, count in ((4 * ten, 10), (ten, 10), (ten - 1, 0)):
        monkeypatch.setattr(measure, "MAX_EXPORT_WORK", limit)
        result = measure.measure_at_export(bundle)
        assert (result.num_texts if result else 0) == count
    for file in ("tokenizer.json", "onnx/model_contributions.onnx"):
        (bundle / file).rename(bundle / "away")
        assert measure.measure_at_export(bundle) is None
        (bundle / "away").rename(bundle / file)


def test_unmeasurable_bundle_is_rejected(minilm_bundle: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("One sentence that is long enough to be ranked.\nToo short.\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"only 1 texts have at least 5 tokens, but 10 are needed"):
        measure_faithfulness(minilm_bundle, few)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SourceError, match=r"binary\.txt can't be read as text"):
        measure_faithfulness(minilm_bundle, binary)
    bundle = shutil.copytree(minilm_bundle, tmp_path / "bundle")
    (bundle / "onnx" / "model_contributions.onnx").unlink()
    with pytest.raises(
        BundleError, match=r"model_contributions\.onnx does not exist.* export the bundle again"
    ):
        measure_faithfulness(bundle)


def test_command_measures_and_records(small_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = shutil.copytree(small_bundle("wordpiece"), tmp_path / "bundle")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(read_texts(None)[:11]), encoding="utf-8")
    options = ["--faithfulness", "--contribution-norm", "--texts", str(texts), "--parity-tokens", "7"]
    ended = CliRunner().invoke(check, [str(bundle), *options])
    assert ended.exit_code == 0, ended.output
    assert "Faithfulness of explanations, 11 texts" in ended.output
    assert "leave one out" in ended.output
    assert len(read_manifest(bundle).faithfulness) == 8
    for option in (options[1:2], options[2:4]):
        refused = CliRunner().invoke(check, [str(bundle), *option])
        assert f"{option[0]} needs --faithfulness" in refused.output
