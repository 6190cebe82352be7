"""`attnlens check --source`: the served bundle against the publisher's pipeline."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from attnlens.bundle import read_manifest, write_manifest
from attnlens.v1.manifest_pb2 import Pooling
from attnlens_cli.commands.bundles.check import check
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from published_layouts import edit, export_options, make
from small_files import sign

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
    results = [row["result"] for row in publisher["comparisons"]]
    assert results[:4] == (
        ["token ids", "token types", "hidden states", "logits"]
        if layout == "classifier"
        else ["prompts", "default prompt", "token ids", *([results[3]])]
    )
    assert ("embeddings (prompt query)" in results) == (layout == "mean with prompts")


def test_difference_is_named_and_exits_with_1(embedder: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(embedder.parent / "source", tmp_path / "changed"))
    edit(changed / "sentence_bert_config.json", do_lower_case=True)
    edit(changed / "1_Pooling" / "config.json", pooling_mode="cls")
    result = run(embedder, changed)
    assert result.exit_code == 1
    assert "Served bundle against sentence-transformers" in result.stdout
    assert "the bundle differs from sentence-transformers " in result.output
    assert "embeddings differ by " in result.output


def test_options_of_the_export_and_other_versions_are_reported(embedder: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(embedder, tmp_path / "bundle"))
    edit(bundle / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    sign(bundle)
    manifest = read_manifest(bundle)
    manifest.pooling.pooling = Pooling.POOLING_CLS
    manifest.publisher.not_compared[:] = ["embeddings: chosen by --pooling, --normalize or --skip-module"]
    manifest.publisher.versions["transformers"] = "5.0.0"
    write_manifest(bundle, manifest)
    result = run(bundle, embedder.parent / "source")
    assert result.exit_code == 0, result.output
    lines = " ".join(result.stdout.split())
    assert "not compared with the publisher's results: embeddings: chosen by --pooling" in lines
    assert "is installed, but the export compared the bundle with 5.0.0" in lines


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
