"""Comparison with the publisher's implementation."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from attnlens.bundle import read_manifest
from attnlens_cli.commands.bundles.check import ServedBundle, check
from attnlens_export import ExportOptions, SourceError, export_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_export.publisher import (
    MAX_TOKENS,
    PublisherResult,
    compare_scores_with_publisher,
    compare_with_publisher,
)
from odd_models import OddModel
from small_bundles import TOKENIZERS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LIMIT = 2e-5
MODEL = OddModel("Roberta", {"num_hidden_layers": 1, "max_position_embeddings": 34, "type_vocab_size": 1})
TYPES = "sentence_transformers.models."


def edit_json(path: Path, **values: object) -> None:
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(content | values), "utf-8")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a cased tokenizer, mean pooling and a prompt."""
    directory = tmp_path_factory.mktemp("published")
    MODEL.make().save_pretrained(directory)
    shutil.copytree(TOKENIZERS / "byte-level", directory, dirs_exist_ok=True)
    edit_json(directory / "tokenizer_config.json", model_max_length=32)
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{TYPES}Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{TYPES}Pooling"})
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    size = json.loads((directory / "config.json").read_text("utf-8"))["hidden_size"]
    edit_json(
        directory / "1_Pooling" / "config.json", word_embedding_dimension=size, pooling_mode_mean_tokens=True
    )
    edit_json(directory / "sentence_bert_config.json", max_seq_length=32)
    edit_json(directory / "config_sentence_transformers.json", prompts={"query": "question: "})
    return directory


@pytest.fixture(scope="module")
def bundle(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundles") / "small"
    export_bundle(published, directory, ExportOptions(grid=small_grid(32)))
    return directory


@pytest.fixture
def changed(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "changed"))


def compare(bundle: Path, source: Path) -> PublisherResult:
    with ServedBundle(bundle, MAX_TOKENS) as served:
        return compare_with_publisher(served, source, LIMIT, lambda _detail, _done, _total: None)


def failed(result: PublisherResult) -> dict[str, float]:
    return {found.result: found.max_abs_error for found in result.comparisons if not found.passed}


def test_correct_bundle_passes_in_all_results_with_and_without_a_prompt(
    bundle: Path, published: Path
) -> None:
    result = compare(bundle, published)
    assert result.failures() == []
    assert result.implementation.startswith("sentence-transformers ")
    kinds = ["token ids", "hidden states", "embeddings"]
    assert [found.result for found in result.comparisons] == kinds + [
        f"{kind} (prompt query)" for kind in kinds
    ]
    assert {found.num_texts for found in result.comparisons} == {17}


def test_without_modules_transformers_computes_the_hidden_states(bundle: Path, changed: Path) -> None:
    (changed / "modules.json").unlink()
    result = compare(bundle, changed)
    assert result.failures() == []
    assert result.implementation.startswith("transformers ")
    assert [found.result for found in result.comparisons] == ["token ids", "hidden states"]
    assert result.not_compared == ("embeddings: the checkpoint has no sentence-transformers modules",)


def lower_case(source: Path) -> None:
    edit_json(source / "sentence_bert_config.json", do_lower_case=True)


def truncate_left(source: Path) -> None:
    edit_json(source / "tokenizer_config.json", truncation_side="left")


def change_weight(source: Path) -> None:
    path = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = next(name for name in tensors if name.endswith("attention.self.query.weight"))
    tensors[name][0] += np.float32(1)
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})


def pool_by_cls(source: Path) -> None:
    edit_json(
        source / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lower_case, {"token ids", "embeddings"}),
        (truncate_left, {"token ids", "embeddings"}),
        (change_weight, {"hidden states", "embeddings"}),
        (pool_by_cls, {"embeddings"}),
    ],
)
def test_bundle_that_misread_its_checkpoint_fails(
    change: Callable[[Path], None], expected: set[str], bundle: Path, changed: Path
) -> None:
    """The bundle lacks a setting of the checkpoint, or has a different weight."""
    change(changed)
    result = compare(bundle, changed)
    assert {name for name in failed(result) if "prompt" not in name} == expected


def test_embeddings_are_not_compared_if_the_export_replaced_the_pooling(bundle: Path, changed: Path) -> None:
    pool_by_cls(changed)
    result = CliRunner().invoke(
        check, [str(bundle), "--source", str(changed), "--against", "transformers", "--parity-tokens", "7"]
    )
    assert result.exit_code == 0, result.output
    assert "token ids" in result.stdout
    assert "the export replaced the pooling" in " ".join(result.stdout.split())


def test_command_prints_a_table_and_exits_with_1_on_a_mismatch(bundle: Path, changed: Path) -> None:
    lower_case(changed)
    arguments = [str(bundle), "--source", str(changed), "--against", "transformers", "--parity-tokens", "7"]
    result = CliRunner().invoke(check, arguments)
    assert result.exit_code == 1
    assert "Served bundle against sentence-transformers" in result.stdout
    assert "the bundle differs from its publisher's implementation: token ids differ in " in result.output
    result = CliRunner().invoke(check, [*arguments, "--json"])
    assert not json.loads(result.stdout[: result.stdout.rindex("}") + 1])["publisher"]["passed"]


def test_checkpoint_that_transformers_cannot_load_is_an_error(bundle: Path, changed: Path) -> None:
    (changed / "modules.json").unlink()
    edit_json(changed / "config.json", model_type="nonesuch", auto_map={"AutoModel": "model.Nonesuch"})
    with pytest.raises(SourceError, match=r"transformers cannot load .* or not without running its code"):
        compare(bundle, changed)


def test_against_needs_a_source(bundle: Path) -> None:
    result = CliRunner().invoke(check, [str(bundle), "--against", "transformers"])
    assert result.exit_code == 2
    assert "--against needs --source" in result.output


# --- Classifiers and rerankers --------------------------------------------------------------------


def compare_scores(bundle: Path, source: Path) -> PublisherResult:
    is_reranker = len(read_manifest(bundle).classifier.labels) == 1
    with ServedBundle(bundle, MAX_TOKENS) as served:
        return compare_scores_with_publisher(
            served, source, LIMIT, lambda _detail, _done, _total: None, is_reranker=is_reranker
        )


@pytest.mark.parametrize(
    ("name", "library", "num_texts"), [("reranker", "transformers", 16), ("topics", "transformers", 33)]
)
def test_correct_bundle_of_a_classifier_passes_in_all_results(
    name: str, library: str, num_texts: int, classifier_bundle: Callable[[str], Path]
) -> None:
    bundle = classifier_bundle(name)
    result = compare_scores(bundle, bundle.parent / "source")
    assert result.failures() == []
    assert result.implementation.startswith(f"{library} ")
    assert [found.result for found in result.comparisons] == ["token ids", "logits", "scores"]
    assert {found.num_texts for found in result.comparisons} == {num_texts}


def read_scores_as_logits(source: Path) -> None:
    edit_json(source / "config.json", sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")


def change_head(source: Path) -> None:
    path = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["classifier.bias"] += np.float32(0.001)
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "library", "expected"),
    [
        (read_scores_as_logits, "sentence-transformers", {"scores"}),
        (change_head, "transformers", {"logits", "scores"}),
    ],
)
def test_bundle_that_misread_its_head_fails(
    change: Callable[[Path], None],
    library: str,
    expected: set[str],
    classifier_bundle: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    bundle = classifier_bundle("reranker")
    source = Path(shutil.copytree(bundle.parent / "source", tmp_path / "changed"))
    change(source)
    result = compare_scores(bundle, source)
    assert result.implementation.startswith(f"{library} ")
    assert set(failed(result)) == expected


def test_command_compares_logits(classifier_bundle: Callable[[str], Path]) -> None:
    bundle = classifier_bundle("reranker")
    arguments = [str(bundle), "--source", str(bundle.parent / "source"), "--against", "transformers"]
    result = CliRunner().invoke(check, [*arguments, "--parity-tokens", "7", "--json"])
    assert result.exit_code == 0, result.output
    [_, logits, _] = json.loads(result.stdout)["publisher"]["comparisons"]
    assert logits["result"] == "logits"
    assert 0 < logits["max_abs_error"] < logits["limit"] < 1e-4
