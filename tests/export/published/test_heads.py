"""Checkpoints that are used for something else than embeddings: refused, or exported with a warning."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import Pooling
from attnlens_cli.commands.bundles.export import export
from attnlens_export import SourceError
from attnlens_export.check import check_bundle
from attnlens_export.parity.grid import small_grid
from attnlens_export.published.heads import find_head
from attnlens_export.published.pooling import POOLINGS, check_pooling_known
from attnlens_model import load_checkpoint
from odd_models import OddModel
from small_bundles import MODELS, TOKENIZERS
from small_files import write

ONE_LAYER = {"num_hidden_layers": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
DECODER = {"num_hidden_layers": 1, "pad_token_id": 0, "head_dim": 32, "num_key_value_heads": 3}
T5_SIZES = {"d_model": 96, "d_ff": 160, "num_layers": 1, "num_heads": 3, "d_kv": 32, "num_decoder_layers": 2}


def save(kind: str, directory: Path) -> Path:
    MODELS["wordpiece"].make(kind).save_pretrained(directory)
    shutil.copytree(TOKENIZERS / "wordpiece", directory, dirs_exist_ok=True)
    return directory


def run_export(*arguments: object) -> Result:
    return CliRunner().invoke(export, [str(each) for each in (*arguments, "--parity-tokens", 7)])


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        (
            "Bert",
            "ForSequenceClassification",
            "a classifier or a reranker, judging by its head (classifier.bias, ",
        ),
        ("Bert", "ForTokenClassification", "a token classifier"),
        ("Bert", "ForMultipleChoice", "a multiple-choice classifier"),
        ("Roberta", "ForQuestionAnswering", "a model for question answering"),
        ("XLMRoberta", "ForSequenceClassification", "a classifier or a reranker"),
        ("DistilBert", "ForSequenceClassification", "a classifier or a reranker"),
        ("ModernBert", "ForSequenceClassification", "a classifier or a reranker"),
        ("T5", "ForSequenceClassification", "a classifier or a reranker"),
    ],
)
def test_task_head_is_found(name: str, kind: str, what: str, tmp_path: Path) -> None:
    changes = ONE_LAYER | {"cls_token_id": 1, "sep_token_id": 1}
    changes |= T5_SIZES if name == "T5" else {}
    changes |= {"pad_token_id": 1} if "Roberta" in name else {}
    OddModel(name, changes).make(kind).save_pretrained(tmp_path)
    head = find_head(tmp_path, load_checkpoint(tmp_path).unused_tensors)
    assert head is not None
    assert head.describe().startswith(f"this checkpoint is {what}")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Bert", "Model"),
        ("Bert", "ForPreTraining"),
        ("Albert", "ForPreTraining"),
        ("Electra", "ForMaskedLM"),
        ("Qwen3", "ForCausalLM"),
    ],
)
def test_pretraining_head_is_not_a_task_head(name: str, kind: str, tmp_path: Path) -> None:
    changes = {"num_key_value_heads": 3} if name == "Qwen3" else {}
    OddModel(name, ONE_LAYER | changes).make(kind).save_pretrained(tmp_path)
    assert find_head(tmp_path, load_checkpoint(tmp_path).unused_tensors) is None


def test_classifier_that_its_publisher_embeds_with_is_an_embedder(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"architectures": ["BertForSequenceClassification"]})
    tensors = ["classifier.weight", "classifier.bias"]
    assert find_head(tmp_path, tensors) is not None
    kinds = ["Transformer", "Pooling"]
    types = [{"path": str(i), "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    write(tmp_path / "modules.json", types)
    assert find_head(tmp_path, tensors) is None


@pytest.mark.parametrize(
    ("types", "what"),
    [
        (["sentence_transformers.sparse_encoder.models.MLMTransformer", "x.Pooling"], "a sparse encoder"),
        (["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"], "a late-interaction enc"),
    ],
)
def test_older_files_of_sparse_and_late_interaction_models_are_known(
    types: list[str], what: str, tmp_path: Path
) -> None:
    write(tmp_path / "modules.json", [{"path": str(i), "type": name} for i, name in enumerate(types)])
    head = find_head(tmp_path, ())
    assert head is not None
    assert head.checkpoint_kind.startswith(what)


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (OddModel("Bert", ONE_LAYER), "Model"),
        (OddModel("Bert", ONE_LAYER), "ForMaskedLM"),
        (OddModel("Qwen3", DECODER), "Model"),
        (OddModel("Qwen3", DECODER), "ForCausalLM"),
        (OddModel("Qwen3", DECODER | {"tie_word_embeddings": True}), "ForCausalLM"),
        (OddModel("Llama", DECODER), "Model"),
        (OddModel("Gemma3Text", DECODER | {"query_pre_attn_scalar": 32}), "Model"),
        (OddModel("GPT2", ONE_LAYER), "Model"),
        (OddModel("GPT2", ONE_LAYER), "LMHeadModel"),
    ],
    ids=str,
)
def test_checkpoint_that_does_not_say_how_it_is_pooled_needs_a_pooling(
    odd: OddModel, kind: str, tmp_path: Path, output: Path
) -> None:
    odd.make(kind).save_pretrained(tmp_path)
    result = run_export(tmp_path, "--output", output)
    assert result.exit_code == 1
    assert "does not specify its pooling" in result.stderr
    assert f"--pooling {'|'.join(POOLINGS)}" in result.stderr
    assert not output.exists()


@pytest.mark.parametrize("kinds", [[], ["Transformer"], ["Transformer", "Pooling", "Normalize"]])
def test_only_a_listed_pooling_module_defines_the_pooling(kinds: list[str], tmp_path: Path) -> None:
    types = [{"path": str(i), "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    if kinds:
        write(tmp_path / "modules.json", types)
    check_pooling_known(tmp_path, "mean")
    if "Pooling" in kinds:
        check_pooling_known(tmp_path, None)
    else:
        with pytest.raises(SourceError, match=r"does not specify its pooling"):
            check_pooling_known(tmp_path, None)


def test_original_colbert_is_detected_by_its_class_and_tensor(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"architectures": ["HF_ColBERT"]})
    head = find_head(tmp_path, ["linear.weight", "bert.pooler.dense.weight"])
    assert head is not None
    assert head.checkpoint_kind.startswith("a late-interaction encoder")
    assert head.tensors == ("linear.weight",)


def test_late_interaction_encoder_is_detected_by_the_file_of_the_original_program(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"architectures": ["BertModel"]})
    write(tmp_path / "artifact.metadata", {"dim": 128})
    head = find_head(tmp_path, ["linear.weight"])
    assert head is not None
    assert head.describe().startswith("this checkpoint is a late-interaction encoder")


def test_masked_language_model_is_not_pooled_like_a_sparse_encoder_without_a_request(
    tmp_path: Path, output: Path
) -> None:
    """SPLADE in the format of transformers has no file that says so."""
    source = save("ForMaskedLM", tmp_path / "source")
    refused = run_export(source, "--output", output, "--pooling", "max")
    assert refused.exit_code == 1
    assert "sparse encoders (SPLADE)" in refused.stderr
    assert "add --without-head to pool the token vectors" in refused.stderr
    assert not output.exists()
    for options in (("max", "--without-head"), ("mean",)):
        result = run_export(source, "--output", output, "--force", "--pooling", *options)
        assert result.exit_code == 0, result.output
        [warning] = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
        assert "a head for masked language modeling, which is omitted. If it is a sparse encoder" in warning


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that sentence-transformers saved, by the name of the class."""
    import sentence_transformers as library  # noqa: PLC0415 - slow

    saved = {}
    for name, kind in (
        ("CrossEncoder", "ForSequenceClassification"),
        ("SparseEncoder", "ForMaskedLM"),
        ("MultiVectorEncoder", "Model"),
    ):
        directory = tmp_path_factory.mktemp(name)
        kind_of: Any = getattr(library, name)
        kind_of(str(save(kind, directory / "plain")), device="cpu").save(str(directory / "saved"))
        saved[name] = directory / "saved"
    return saved


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("SparseEncoder", "a sparse encoder (SPLADE)"),
        ("MultiVectorEncoder", "a late-interaction encoder (ColBERT)"),
    ],
)
def test_other_model_types_of_sentence_transformers_are_rejected(
    name: str, what: str, theirs: dict[str, Path], output: Path
) -> None:
    result = run_export(theirs[name], "--output", output)
    assert result.exit_code == 1
    assert f"this checkpoint is {what}" in result.stderr
    assert "add --without-head and a --pooling to use the token vectors" in result.stderr
    assert "--skip-module" not in result.stderr
    assert not output.exists()


@pytest.mark.filterwarnings("ignore")
def test_encoder_of_a_reranker_is_exported_only_on_request_and_with_a_warning(
    theirs: dict[str, Path], output: Path
) -> None:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow

    result = run_export(theirs["CrossEncoder"], "--output", output, "--without-head", "--pooling", "cls")
    assert result.exit_code == 0, result.output
    [warning] = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert "a cross-encoder (reranker)" in warning
    assert "was not trained to compute embeddings" in warning
    assert (
        "embeddings: cls over the tokens; not normalized; 96 components (as in the options)" in result.stdout
    )
    assert read_manifest(output).pooling.pooling == Pooling.POOLING_CLS
    assert check_bundle(output, grid=small_grid(32)).verdict.passed
    shutil.copy(theirs["CrossEncoder"] / "model.safetensors", output)
    assert SentenceTransformer(str(output), device="cpu").encode(["w1"]).shape == (1, 96)


def test_classifier_needs_a_pooling_beside_the_decision_to_leave_its_head_out(
    tmp_path: Path, output: Path
) -> None:
    source = save("ForSequenceClassification", tmp_path / "source")
    assert run_export(source, "--output", output, "--pooling", "mean").exit_code == 1
    result = run_export(source, "--output", output, "--without-head")
    assert result.exit_code == 1
    assert f"specify --pooling {'|'.join(POOLINGS)}" in result.stderr


def test_other_heads_of_bge_m3_and_code_that_was_not_run_are_reported(tmp_path: Path, output: Path) -> None:
    source = save("Model", tmp_path / "source")
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (source / name).touch()
    config = json.loads((source / "config.json").read_text("utf-8"))
    write(source / "config.json", config | {"auto_map": {"AutoModel": "modeling.MyModel"}})
    tokenizer = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    auto_map = {"AutoTokenizer": ["tokenization.MyTokenizer", None]}
    write(source / "tokenizer_config.json", tokenizer | {"auto_map": auto_map})
    result = run_export(source, "--output", output, "--pooling", "cls", "--tokenizer", "published")
    assert result.exit_code == 0, result.output
    first, second, third = (line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert first.startswith(
        "warning: colbert_linear.pt and sparse_linear.pt are omitted: the bundle computes"
    )
    assert second.startswith("warning: the publisher's own code (auto_map in config.json) was not executed")
    assert third.startswith("warning: the publisher's own code (auto_map in tokenizer_config.json) was not")


def test_export_reads_only_regular_files_of_the_checkpoint(tmp_path: Path, output: Path) -> None:
    source = save("Model", tmp_path / "source")
    os.mkfifo(source / "LICENSE")
    result = run_export(source, "--output", output, "--pooling", "cls")
    assert result.exit_code == 1
    assert f"{source / 'LICENSE'} is not a regular file: replace it with a copy" in result.stderr
    assert not output.exists()
