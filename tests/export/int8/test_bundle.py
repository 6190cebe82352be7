"""Bundles with an int8 graph: manifest, rejected inputs, and errors that `check` detects."""

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from attnlens.bundle import BundleError, read_manifest, write_manifest
from attnlens.v1.manifest_pb2 import Precision
from attnlens.v1.quantization_pb2 import Quantization, QuantizationMethod
from attnlens_cli.commands.bundles.check import check
from attnlens_cli.commands.bundles.export import export
from attnlens_export import AccuracyError, ExportOptions, Int8, SourceError, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.contents import bundle_files
from attnlens_export.int8 import precision
from attnlens_export.int8.recipes import MIN_EXACT_COLUMNS
from attnlens_export.int8.result import Gate, Int8Result
from attnlens_export.int8.texts import (
    KINDS,
    read_kinds,
    split_texts,
)
from attnlens_export.parity.grid import small_grid
from odd_models import OddModel
from small_bundles import export_small
from small_files import sign

STSB = Path(__file__).parents[2] / "data" / "stsb-en-dev.csv"
LOOSE = Gate(min_mean_cosine=0.99, min_cosine=0.9)


@pytest.fixture(scope="module")
def int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small("wordpiece", tmp_path_factory.mktemp("int8"), precisions=[Int8(LOOSE)])


@pytest.fixture
def copied(int8_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(int8_bundle, tmp_path / "copy"))


def quantization(directory: Path) -> Quantization:
    graph = read_manifest(directory).graphs[-1]
    assert (graph.path, graph.precision) == ("onnx/model_int8.onnx", Precision.PRECISION_INT8)
    return graph.quantization


def test_manifest_records_choices_and_measurements(int8_bundle: Path) -> None:
    made = quantization(int8_bundle)
    gates = [gate for gate in read_manifest(int8_bundle).parity.gates if gate.graph == "embeddings.int8"]
    assert [(gate.text_kind, gate.limit) for gate in gates] == [
        *((kind, limit) for kind in KINDS for limit in (0.99, 0.9)),
        ("", 1e-5),
        ("", 0),  # repeated runs
    ]
    assert [gate.value for gate in gates] == [
        *(cosine for kind in made.text_kinds for cosine in (kind.mean_cosine, kind.min_cosine)),
        made.max_batch_difference,
        0,
    ]
    assert 0.99 <= made.mean_cosine < 1
    assert 0.9 <= made.min_cosine <= made.mean_cosine
    assert 0.5 < made.min_token_cosine <= made.mean_token_cosine < 1
    assert 0.5 < made.neighbor_agreement <= 1
    assert made.max_batch_difference <= 1e-5
    texts = (int8_bundle / "parity" / "int8_texts.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert made.num_texts == len(texts) == sum(kind.num_texts for kind in made.text_kinds)
    assert [kind.name for kind in made.text_kinds] == list(KINDS)
    for kind in made.text_kinds:
        assert 0.99 <= kind.mean_cosine < 1
        assert 0.9 <= kind.min_cosine <= kind.mean_cosine
    calibration = [text for kind in read_kinds(None).values() for text in kind[::2]]
    assert made.num_calibration_texts == len(calibration)
    # The empty text is the only one that every encoder will see.
    assert set(texts) & set(calibration) == {""}
    selection = [text for kind in read_kinds(None).values() for text in split_texts(kind).selection]
    assert made.num_selection_texts == len(selection)
    assert set(texts) & set(selection) == {""}
    assert made.num_judged_graphs == 1
    assert made.num_tokens > 5 * len(texts)
    assert len(made.matmuls) == 6
    methods = {product.method for product in made.matmuls}
    assert methods - {QuantizationMethod.QUANTIZATION_METHOD_FP32}
    assert QuantizationMethod.QUANTIZATION_METHOD_UNSPECIFIED not in methods
    for product in made.matmuls:
        has_columns = product.method == QuantizationMethod.QUANTIZATION_METHOD_EXACT_COLUMNS
        assert product.num_exact_columns == (MIN_EXACT_COLUMNS if has_columns else 0)
    assert "## In int8" in (int8_bundle / "parity" / "report.md").read_text(encoding="utf-8")
    assert not [path for path in bundle_files(int8_bundle) if path.name.startswith(".")]


def test_check_measures_it_again(int8_bundle: Path) -> None:
    verdict = check_bundle(int8_bundle, grid=small_grid(2)).verdict
    assert verdict.passed
    result = verdict.precisions["int8"]
    assert isinstance(result, Int8Result)
    assert result.quantization == quantization(int8_bundle)
    shown = CliRunner().invoke(check, [str(int8_bundle), "--parity-tokens", "2"])
    assert shown.exit_code == 0, shown.output
    for kind in quantization(int8_bundle).text_kinds:
        for name, value, limit in (("mean", kind.mean_cosine, 0.99), ("min", kind.min_cosine, 0.9)):
            row = rf"{name} cosine of embedding, {kind.name} +{value:.6f} +{limit} +passed"
            assert re.search(row, shown.stdout)


def test_check_takes_a_bundle_that_names_no_kinds(copied: Path) -> None:
    """One of attnlens 0.1.0."""
    manifest = read_manifest(copied)
    del manifest.graphs[-1].quantization.text_kinds[:]
    write_manifest(copied, manifest)
    verdict = check_bundle(copied, grid=small_grid(2)).verdict
    assert verdict.passed
    assert {each.text_kind for each in verdict.precisions["int8"].comparisons} == {"texts", ""}


def test_check_rejects_other_texts_than_the_manifest_names(copied: Path) -> None:
    path = copied / "parity" / "int8_texts.txt"
    path.write_text(path.read_text(encoding="utf-8") + "one more\n", encoding="utf-8")
    sign(copied)
    with pytest.raises(BundleError, match=r"int8_texts\.txt has \d+ texts, but the manifest states \d+"):
        check_bundle(copied, grid=small_grid(2))


def test_check_detects_a_different_weight(copied: Path) -> None:
    path = copied / "onnx" / "model_int8.onnx"
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_int8"):
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.roll(values, 1, axis=0), tensor.name))
    path.write_bytes(model.SerializeToString())
    sign(copied)
    verdict = check_bundle(copied, grid=small_grid(2)).verdict
    assert not verdict.passed
    assert "onnx/model_int8.onnx: mean cosine of embedding on " in verdict.failures()[0]


def test_unreachable_gate_is_rejected(tmp_path: Path) -> None:
    gate = Gate(min_mean_cosine=0.9999999, min_cosine=0.9999999)
    with pytest.raises(AccuracyError, match=r"no (graph|matrix product) in int8 .*lower --min-mean-cosine"):
        export_small("wordpiece", tmp_path, precisions=[Int8(gate)])
    assert not (tmp_path / "bundle").exists()


def test_without_a_tokenizer_it_is_rejected(tmp_path: Path) -> None:
    OddModel("Bert", {"num_hidden_layers": 1}).make().save_pretrained(tmp_path / "source")
    options = ExportOptions(pooling="mean", grid=small_grid(2), precisions=[Int8()])
    with pytest.raises(SourceError, match="calibrated with texts, but the bundle has no tokenizer"):
        export_bundle(tmp_path / "source", tmp_path / "bundle", options)


@pytest.mark.parametrize(
    "option", [("--min-cosine", "0.9"), ("--min-mean-cosine", "0.9"), ("--calibration", STSB)]
)
def test_int8_options_require_int8(option: tuple[str, object], tmp_path: Path) -> None:
    arguments = ["model", "--output", str(tmp_path / "bundle"), *map(str, option)]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 2
    assert "need --precision int8" in result.output


def test_graph_that_fails_on_unseen_texts_is_replaced_by_one_of_a_stricter_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first search may use up the gate twenty times."""
    gate = Gate(min_mean_cosine=0.99998, min_cosine=0.9995)
    monkeypatch.setattr(precision, "SEARCH_SHARES", (20.0, 0.5))
    bundle = export_small("wordpiece", tmp_path, precisions=[Int8(gate)])
    made = quantization(bundle)
    assert made.num_judged_graphs == 2
    assert made.mean_cosine >= 0.99998
    monkeypatch.setattr(precision, "SEARCH_SHARES", (20.0,))
    (tmp_path / "again").mkdir()
    with pytest.raises(AccuracyError, match="1 graphs in int8 pass on the texts for selection, but fail"):
        export_small("wordpiece", tmp_path / "again", precisions=[Int8(gate)])
