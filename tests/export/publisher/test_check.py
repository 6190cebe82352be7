"""`attnlens check --source`: the served bundle against the publisher's pipeline."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from attnlens.bundle import read_manifest, write_manifest
from attnlens.tensors import from_tensor, to_tensor
from attnlens.v1.explanation_pb2 import EXPLAIN_METHOD_CONTRIBUTIONS as CONTRIBUTIONS
from attnlens.v1.manifest_pb2 import EmbeddingRanges, Pooling
from attnlens.v1.tensor_pb2 import DataType
from attnlens_cli.commands.bundles.check import check
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_export.progress import no_stage_progress
from attnlens_export.restated import compare_ranges
from attnlens_model import read_config
from published_layouts import edit, export_options, make
from small_files import sign

NO_VALUES = to_tensor(np.zeros((2, 3), np.float32), DataType.DATA_TYPE_FLOAT32)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def with_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNLENS_CHECK_WITHOUT_COMPARISON")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Export a layout without the comparison. The checkpoint is in `source` next to the bundle."""

    def export(layout: str) -> Path:
        directory = tmp_path_factory.mktemp("checked")
        options = ExportOptions(grid=small_grid(16), **export_options(layout, comparison=False))
        export_bundle(make(layout, directory), directory / "bundle", options)
        return directory / "bundle"

    return export


@pytest.fixture(scope="module")
def embedder(made: Callable[[str], Path]) -> Path:
    return made("mean with prompts")


def run(bundle: Path, source: Path, *options: str) -> Result:
    return CliRunner().invoke(check, [str(bundle), "--source", str(source), "--parity-tokens", "7", *options])


@pytest.mark.parametrize("layout", ["mean with prompts", "cross-encoder", "classifier"])
def test_served_bundle_returns_what_the_publisher_returns(layout: str, made: Callable[[str], Path]) -> None:
    bundle = made(layout)
    result = run(bundle, bundle.parent / "source", "--json")
    assert result.exit_code == 0, result.output
    publisher = json.loads(result.stdout)["publisher"]
    assert publisher["passed"]
    assert publisher["not_compared"] == []
    results = [row["figure"].removeprefix("difference of ") for row in publisher["comparisons"]]
    first = {
        "mean with prompts": ["prompts", "default prompt", "similarity", "token ids"],
        "cross-encoder": ["prompts", "default prompt", "token ids", "token types"],
        "classifier": ["token ids", "token types", "hidden states", "logits"],
    }
    assert results[: len(first[layout])] == first[layout]
    assert ("embeddings (prompt query)" in results) == (layout == "mean with prompts")


def test_difference_is_named_and_exits_with_1(embedder: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(embedder.parent / "source", tmp_path / "changed"))
    edit(changed / "sentence_bert_config.json", do_lower_case=True)
    edit(changed / "1_Pooling" / "config.json", pooling_mode="cls")
    result = run(embedder, changed)
    assert result.exit_code == 1
    assert "Served bundle against sentence-transformers" in result.stdout
    assert "the bundle differs from sentence-transformers " in result.output
    assert "difference of embeddings" in result.output


def test_options_of_the_export_and_other_versions_are_reported(embedder: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(embedder, tmp_path / "bundle"))
    edit(bundle / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    sign(bundle)
    manifest = read_manifest(bundle)
    manifest.pooling.pooling = Pooling.POOLING_CLS
    manifest.publisher.not_compared[:] = ["embeddings: chosen by --pooling, --normalize or --skip-module"]
    manifest.publisher.versions["transformers"] = "5.0.0"
    manifest.ClearField("embedding_ranges")
    write_manifest(bundle, manifest)
    result = run(bundle, embedder.parent / "source")
    assert result.exit_code == 0, result.output
    lines = " ".join(result.stdout.split())
    assert "not compared with the publisher's results: embeddings: chosen by --pooling" in lines
    assert "another version: transformers: " in lines
    assert " installed, but 5.0.0 at the export" in lines


def test_manifest_that_contradicts_the_checkpoint_is_named_with_both_values(
    embedder: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(embedder, tmp_path / "bundle"))
    manifest = read_manifest(bundle)
    manifest.weights_license = "mit"
    manifest.publisher.library, manifest.publisher.longest_tokens = "transformers", 512
    ranges = from_tensor(manifest.embedding_ranges.values).copy()
    ranges[1, 3] = 9
    manifest.embedding_ranges.values.CopyFrom(to_tensor(ranges, DataType.DATA_TYPE_FLOAT32))
    write_manifest(bundle, manifest)
    result = run(bundle, embedder.parent / "source")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    found = [line.removeprefix("the manifest differs: ") for line in lines if line.startswith("the manifest")]
    assert found[0] == "weights_license is 'mit', but '' according to the checkpoint"
    assert found[1].startswith("embedding_ranges.values: the maximum of component 3 is 9, but ")
    assert found[2:] == [
        "publisher.library is 'transformers', but 'sentence-transformers' was compared now",
        "publisher.longest_tokens is 512, but 32 was compared now",
    ]
    assert f"Error: the manifest is wrong: {found[0]} (and 3 more). Export the bundle again" in result.output


def test_limit_of_length_is_that_of_the_checkpoint(embedder: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(embedder, tmp_path / "bundle"))
    edit(bundle / "sentence_bert_config.json", max_seq_length=31)
    manifest = read_manifest(bundle)
    manifest.max_tokens = 31
    write_manifest(bundle, manifest)
    sign(bundle)
    result = run(bundle, embedder.parent / "source", "--without-comparison")
    assert result.exit_code == 1
    expected = "the manifest is wrong: max_tokens is 31, but 32 according to the checkpoint"
    assert expected in result.output


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (EmbeddingRanges(num_texts=7), "num_texts is 7, but 1253 texts were measured"),
        (EmbeddingRanges(num_texts=1253, values=NO_VALUES), "values has the shape (2, 3), but (2, 96) as"),
    ],
)
def test_ranges_of_other_texts_or_sizes_differ(ranges: EmbeddingRanges, message: str, embedder: Path) -> None:
    config = read_config(embedder / "config.json")
    [found] = compare_ranges(embedder, ranges, config, no_stage_progress)
    assert found.startswith(f"embedding_ranges.{message}")


def test_faithfulness_is_compared_on_request_and_not_replaced_by_another(
    embedder: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(embedder, tmp_path / "bundle"))
    options = ("--without-comparison", "--faithfulness")
    first = run(bundle, embedder.parent / "source", *options)
    assert first.exit_code == 0, first.output
    assert "now in the bundle's report" in first.stdout
    manifest = read_manifest(bundle)
    changed = next(entry for entry in manifest.faithfulness if entry.method == CONTRIBUTIONS)
    changed.rank_correlation -= 0.1
    write_manifest(bundle, manifest)
    second = run(bundle, embedder.parent / "source", *options)
    assert second.exit_code == 1
    stated = f"the rank correlation of contributions is {changed.rank_correlation}, but "
    assert f"the manifest is wrong: faithfulness: {stated}" in " ".join(second.output.split())
    assert "now in the bundle's report" not in second.stdout
    assert read_manifest(bundle) == manifest


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ((), {"auto_map": {"AutoModel": "model.Own"}}, "the pipeline needs the publisher's own code"),
        (("--without-comparison",), {}, ""),
    ],
)
def test_checkpoint_that_is_not_compared(
    options: tuple[str, ...], changes: dict[str, object], message: str, embedder: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(embedder.parent / "source", tmp_path / "source"))
    edit(source / "config.json", **changes)
    result = run(embedder, source, *options)
    assert result.exit_code == 0, result.output
    assert "Served bundle against" not in result.stdout
    assert message in " ".join(result.stdout.split())


def test_broken_checkpoint_states_that_it_cannot_be_compared(embedder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(embedder.parent / "source", tmp_path / "source"))
    (source / "tokenizer.json").write_text("{")
    result = run(embedder, source)
    assert result.exit_code == 1
    assert "can't be computed, so the bundle can't be compared with them" in result.output
    assert "--without-comparison" in result.output
