"""Settings of sentence-transformers: a bundle supports them, or the export rejects them by name."""

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder import modules as scorer_modules
from sentence_transformers.sentence_transformer import modules as embedder_modules
from sentence_transformers.sentence_transformer.modules import Dropout, Pooling

from attnlens_cli.commands.bundles.export import export
from attnlens_export import SourceError
from attnlens_export.published.settings import (
    ENTRY_KEYS,
    MODEL_KEYS,
    MODULE_KEYS,
    Task,
    check_settings,
    lacks_template_setting,
    transformer_keys,
)
from attnlens_export.published.side_files import read_max_tokens
from attnlens_model import read_config
from attnlens_server import local
from odd_models import OddModel
from small_bundles import TOKENIZERS
from small_files import read, write

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

EMBEDDING: Task = "feature-extraction"
SCORES: Task = "sequence-classification"
SENTENCE, MODEL, MODULES = (
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "modules.json",
)
POOLING, DENSE, NORMALIZE, DROPOUT = (
    f"{index}_{kind}/config.json"
    for index, kind in enumerate(("Pooling", "Dense", "Normalize", "Dropout"), 1)
)
TEXT = "The engineers in the city read it."
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}
TEMPLATE = "{% for message in messages %}I say: {{ message.content }} !{% endfor %}"

Change = dict[str, object]


def make(directory: Path, kind: str = "Model", **changes: Any) -> Path:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 34} | changes
    OddModel("Bert", sizes).make(kind).save_pretrained(directory)
    shutil.copytree(TOKENIZERS / "wordpiece", directory, dirs_exist_ok=True)
    return directory


def edit(directory: Path, file: str, change: Change) -> None:
    """Change keys of a JSON object, or of the first entry of `modules.json`."""
    content = read(directory / file) if (directory / file).exists() else {}
    if isinstance(content, list):
        content[0] |= change
    else:
        content |= change
    write(directory / file, content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint saved by sentence-transformers, with each supported module."""
    directory = tmp_path_factory.mktemp("embedder")
    torch.manual_seed(0)
    dense = Dense(96, 20, activation_function=torch.nn.GELU())
    modules = [Transformer(str(make(directory / "plain"))), Pooling(96), dense, Normalize(), Dropout()]
    prompts = {"words": "word: "}
    model = SentenceTransformer(modules=modules, device="cpu", prompts=prompts, truncate_dim=8)
    model.save(str(directory / "saved"))
    return directory / "saved"


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reranker")
    plain = make(directory / "plain", "ForSequenceClassification", num_labels=1)
    model = CrossEncoder(str(plain), device="cpu")
    model.set_keep_in_fp32_modules(["0.model.classifier"])
    model.save(str(directory / "saved"))
    return directory / "saved"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def embed(directory: Path, method: str = "encode") -> Any:
    model = SentenceTransformer(str(directory), device="cpu")
    return getattr(model, method)([TEXT], prompt_name="words")


def test_saved_checkpoints_are_accepted(saved: Path, reranker: Path) -> None:
    check_settings(saved, EMBEDDING)
    check_settings(reranker, SCORES)
    assert read(reranker / MODEL)["keep_in_fp32_modules"] == ["0.model.classifier"]
    check_settings(reranker, None)
    with pytest.raises(
        SourceError, match=r"transformer_task = 'sequence-classification', modality_config\.text"
    ):
        check_settings(reranker, EMBEDDING)


@pytest.mark.parametrize(
    "package", ["sentence_transformers.models.{0}", "sentence_transformers.models.{0}.{0}"]
)
def test_checkpoints_of_earlier_releases_are_accepted(package: str, checkpoint: Path) -> None:
    """The files that sentence-transformers 2 to 5.3 wrote."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    entries = enumerate(kinds.items())
    write(
        checkpoint / MODULES,
        [
            {"idx": i, "name": str(i), "path": path, "type": package.format(kind)}
            for i, (path, kind) in entries
        ],
    )
    (checkpoint / SENTENCE).unlink()
    write(checkpoint / "sentence_roberta_config.json", {"max_seq_length": 34, "do_lower_case": False})
    flags = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {"word_embedding_dimension": 96, "pooling_mode_mean_tokens": True, "include_prompt": True}
    write(checkpoint / POOLING, pooling | {f"pooling_mode_{flag}": False for flag in flags})
    dense = {"in_features": 96, "out_features": 20, "bias": True}
    write(checkpoint / DENSE, dense | {"activation_function": "torch.nn.modules.activation.GELU"})
    (checkpoint / NORMALIZE).unlink()
    versions = {"sentence_transformers": "2.2.2", "transformers": "4.20.1", "pytorch": "1.11.0"}
    write(checkpoint / MODEL, {"__version__": versions})
    check_settings(checkpoint, EMBEDDING)


@pytest.mark.parametrize(
    ("file", "change", "named", "equivalent", "method"),
    [
        (SENTENCE, {"modality_config": {"text": FORWARD | {"method_output_name": ["hidden_states", 0]}}},
         "modality_config.text.method_output_name = ['hidden_states', 0]",
         {"modality_config": {"text": FORWARD, "image": FORWARD}}, "encode"),
        (SENTENCE, {"config_kwargs": {"num_hidden_layers": 1}}, "config_kwargs.num_hidden_layers = 1",
         {"config_kwargs": {"num_hidden_layers": 2, "attn_implementation": "eager"}}, "encode"),
        (SENTENCE, {"config_args": {"num_hidden_layers": 1}}, "config_args.num_hidden_layers = 1",
         {"config_args": {"num_hidden_layers": 2, "trust_remote_code": True}}, "encode"),
        (SENTENCE, {"model_args": {"config": {"num_hidden_layers": 1}}}, "model_args.config = {",
         {"model_args": {"torch_dtype": "float32", "add_pooling_layer": False}}, ""),
        (SENTENCE, {"model_kwargs": {"subfolder": "other"}}, "model_kwargs.subfolder = 'other'",
         {"model_kwargs": {"attn_implementation": "eager"}}, ""),
        (SENTENCE, {"tokenizer_args": {"do_lower_case": False}}, "tokenizer_args.do_lower_case = False",
         {"tokenizer_args": {"do_lower_case": True}}, "encode"),
        (SENTENCE, {"processor_kwargs": {"model_max_length": 5}}, "processor_kwargs.model_max_length = 5",
         {"processor_kwargs": {"model_max_length": 34}}, "encode"),
        (SENTENCE, {"processor_kwargs": {"model_max_length": 5}, "max_seq_length": 34},
         "processor_kwargs.model_max_length = 5",
         {"processor_kwargs": {"model_max_length": 33}, "max_seq_length": 33}, "encode"),
        (SENTENCE, {"processing_kwargs": {"text": {"max_length": 5}}},
         "processing_kwargs.text.max_length = 5",
         {"processing_kwargs": {"text": {"padding": True}, "image": {"size": 3}}}, "encode"),
        (SENTENCE, {"processing_kwargs": {"common": {"add_special_tokens": False}}},
         "processing_kwargs.common.add_special_tokens = False", {"processing_kwargs": {"chat_template": {}}},
         "encode"),
        (SENTENCE, {"query_length": 5}, "query_length = 5", {"query_length": None}, "encode_query"),
        (SENTENCE, {"document_length": 5}, "document_length = 5", {"document_length": None},
         "encode_document"),
        (SENTENCE, {"query_expansion": {"strategy": "fixed", "length": 30, "attend": True}},
         "query_expansion = {", {"query_expansion": None}, "encode_query"),
        (SENTENCE, {"transformer_task": "fill-mask"}, "transformer_task = 'fill-mask'",
         {"transformer_task": EMBEDDING}, ""),
        (SENTENCE, {"module_output_name": "scores"}, "module_output_name = 'scores'",
         {"module_output_name": "token_embeddings"}, ""),
        (SENTENCE, {"tokenizer_name_or_path": "bert-base-cased"}, "tokenizer_name_or_path = 'bert-base-",
         {"tokenizer_name_or_path": None}, ""),
        (SENTENCE, {"modality_config": {"sound": FORWARD}}, "modality_config.sound = {",
         {"unpad_inputs": False}, ""),
        (SENTENCE, {"max_seq_length": 0}, "max_seq_length = 0", {"max_seq_length": 34}, ""),
        (SENTENCE, {"do_lower_case": "yes"}, "do_lower_case = 'yes'", {"do_lower_case": True}, ""),
        (SENTENCE, {"attention_window": 9, "gate": 1}, "attention_window = 9, gate = 1", {}, ""),
        (MODEL, {"model_type": "Other"}, "model_type = 'Other'", {"model_type": None}, ""),
        (MODEL, {"scale": 20}, "scale = 20", {"requirements": {"transformers": ">=4"}}, ""),
        (MODULES, {"kwargs": ["task"]}, "kwargs = ['task']", {"kwargs": []}, ""),
        (MODULES, {"device": "cpu"}, "device = 'cpu'", {}, ""),
        (POOLING, {"include_prompt": None}, "include_prompt = None", {"include_prompt": True}, "encode"),
        (POOLING, {"temperature": 2}, "temperature = 2", {}, ""),
        (DENSE, {"activation_function": "transformers.activations.NewGELUActivation"},
         "activation_function = 'transformer", {"activation_function": "torch.nn.GELU"}, "encode"),
        (DENSE, {"norm_epsilon": 1e-5}, "norm_epsilon = 1e-05", {"use_residual": False}, ""),
        (NORMALIZE, {"p": 1}, "p = 1", {"module_output_name": None}, ""),
        (DROPOUT, {"p": 0.5}, "p = 0.5", {"dropout": 0.5}, ""),
    ],
)  # fmt: skip
def test_unsupported_setting_is_rejected_by_name(
    file: str, change: Change, named: str, equivalent: Change, method: str, checkpoint: Path, saved: Path
) -> None:
    """`method` is the one whose result changes, if sentence-transformers can load the changed checkpoint."""
    edit(checkpoint, file, equivalent)
    check_settings(checkpoint, EMBEDDING)
    if method:
        original = embed(saved, method)
        np.testing.assert_allclose(embed(checkpoint, method), original, atol=1e-6)
    edit(checkpoint, file, change)
    if method:
        assert np.abs(embed(checkpoint, method) - original).max() > 1e-3
    with pytest.raises(SourceError) as caught:
        check_settings(checkpoint, EMBEDDING)
    assert f"{checkpoint / file} sets {named}" in str(caught.value)
    assert "which bundles do not support: remove it in a copy of the checkpoint" in str(caught.value)


def test_chat_template_is_accepted_only_for_embeddings(checkpoint: Path) -> None:
    edit(checkpoint, SENTENCE, {"modality_config": {"message": FORWARD | {"format": "flat"}}})
    check_settings(checkpoint, EMBEDDING)
    with pytest.raises(SourceError, match=r"modality_config\.message .*which only embedding models support"):
        check_settings(checkpoint, None)
    other = {"message": FORWARD | {"method_output_name": "pooler_output"}}
    edit(checkpoint, SENTENCE, {"modality_config": other})
    with pytest.raises(SourceError, match=r"modality_config\.message\.method_output_name = 'pooler_output'"):
        check_settings(checkpoint, EMBEDDING)


def test_reranker_whose_files_do_not_mention_its_chat_template_is_exported_with_a_warning(
    tmp_path: Path,
) -> None:
    """Releases of sentence-transformers disagree about it."""
    plain = make(tmp_path / "plain", "ForSequenceClassification", num_labels=1)
    assert not lacks_template_setting(plain)
    pair = [(TEXT, "word")]
    bare = CrossEncoder(str(plain), device="cpu").predict(pair, activation_fn=torch.nn.Identity())
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    in_template = CrossEncoder(str(plain), device="cpu").predict(pair, activation_fn=torch.nn.Identity())
    assert abs(in_template - bare).item() > 1e-3
    output = tmp_path / "bundle"
    result = CliRunner().invoke(export, [str(plain), "--output", str(output), "--parity-tokens", "7"])
    assert result.exit_code == 0, result.output
    assert "warning: sentence-transformers 6 inserts the texts of this checkpoint into the" in result.stderr
    with local(output) as model:
        np.testing.assert_allclose(model.score_pairs(pair).logits.ravel(), bare, atol=1e-5)


@pytest.mark.parametrize("name", ["dot", "euclidean", "manhattan"])
def test_other_similarity_needs_an_option(name: str, checkpoint: Path) -> None:
    edit(checkpoint, MODEL, {"similarity_fn_name": name})
    with pytest.raises(
        SourceError, match=f"similarity_fn_name = '{name}'.*: add --similarity cosine to comp"
    ):
        check_settings(checkpoint, EMBEDDING)
    check_settings(checkpoint, EMBEDDING, similarity="cosine")
    # Vectors of length 1 are not cut any more: Compare explains their dot product.
    edit(checkpoint, MODEL, {"truncate_dim": None})
    model = SentenceTransformer(str(checkpoint), device="cpu")
    assert model.similarity_fn_name == name
    if name == "dot":
        check_settings(checkpoint, EMBEDDING)
    else:
        with pytest.raises(SourceError, match="similarity_fn_name"):
            check_settings(checkpoint, EMBEDDING)


def test_bundle_states_the_similarity_that_was_chosen(checkpoint: Path, tmp_path: Path) -> None:
    edit(checkpoint, MODEL, {"similarity_fn_name": "euclidean"})
    arguments = [str(checkpoint), "--output", str(tmp_path / "bundle"), "--parity-tokens", "7"]
    refused = CliRunner().invoke(export, arguments)
    assert refused.exit_code == 1
    assert "add --similarity cosine" in refused.stderr
    accepted = CliRunner().invoke(export, [*arguments, "--similarity", "cosine"])
    assert accepted.exit_code == 0, accepted.output
    assert read(tmp_path / "bundle" / MODEL)["similarity_fn_name"] == "cosine"
    assert read(tmp_path / "bundle" / MODEL)["truncate_dim"] == 8


def test_similarity_is_not_an_option_of_a_reranker(reranker: Path, tmp_path: Path) -> None:
    arguments = [str(reranker), "--output", str(tmp_path / "bundle"), "--similarity", "cosine"]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 1
    assert "--similarity does not apply to a classifier or reranker" in result.stderr


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("config.json", {"sentence_transformers": {"scale": 2}}, "sentence_transformers.scale = 2"),
        ("config.json", {"sentence_transformers": "5.0.0"}, "sentence_transformers = '5.0.0'"),
        (MODEL, {"similarity_fn_name": "dot"}, "similarity_fn_name = 'dot'"),
        (SENTENCE, {"modality_config": {"message": FORWARD}}, "modality_config.message"),
        (SENTENCE, {"transformer_task": "text-generation"}, "transformer_task = 'text-generation'"),
    ],
)  # fmt: skip
def test_unsupported_setting_of_a_reranker_is_rejected(
    file: str, change: Change, named: str, reranker: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(reranker, tmp_path / "changed"))
    edit(changed, "config.json", {"sentence_transformers": {"version": "5.0.0", "activation_fn": None}})
    check_settings(changed, SCORES)
    edit(changed, file, change)
    with pytest.raises(SourceError, match=re.escape(named)):
        check_settings(changed, SCORES)


@pytest.mark.parametrize("kind", ["custom_st.Transformer", "sentence_transformers_extra.models.Transformer"])
@pytest.mark.parametrize("task", [EMBEDDING, SCORES, None])
def test_publishers_own_encoder_class_is_rejected_unless_it_is_skipped(
    kind: str, task: Task | None, saved: Path, reranker: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(reranker if task == SCORES else saved, tmp_path / "changed"))
    edit(changed, MODULES, {"type": kind, "kwargs": ["task"]})
    message = f"loads the encoder with {kind}, which needs the publisher's own code, .*--skip-module {kind}"
    with pytest.raises(SourceError, match=message):
        check_settings(changed, task)
    check_settings(changed, task, skipped=[kind])


def test_chosen_pooling_replaces_the_published_one(checkpoint: Path) -> None:
    edit(checkpoint, POOLING, {"pooling_mode_median_tokens": True})
    with pytest.raises(SourceError, match="sets pooling_mode_median_tokens = True"):
        check_settings(checkpoint, EMBEDDING)
    check_settings(checkpoint, EMBEDDING, pooling_is_chosen=True)


def test_skipped_module_may_have_any_setting(checkpoint: Path) -> None:
    edit(checkpoint, NORMALIZE, {"p": 1})
    check_settings(checkpoint, EMBEDDING, skipped=["Normalize"])


@pytest.mark.parametrize(
    ("sentence_limit", "tokenizer_limit"),
    [(30, 12), (12, 30), (None, 12), (None, 1000), (9, None), (None, None)],
)
def test_limit_is_that_of_sentence_transformers(
    sentence_limit: int | None, tokenizer_limit: int | None, checkpoint: Path
) -> None:
    edit(checkpoint, SENTENCE, {"max_seq_length": sentence_limit} if sentence_limit else {})
    edit(checkpoint, "tokenizer_config.json", {"model_max_length": tokenizer_limit or int(1e30)})
    model = SentenceTransformer(str(checkpoint), device="cpu")
    num_tokens = model.preprocess([TEXT * 9])["input_ids"].shape[1]
    assert read_max_tokens(checkpoint, read_config(checkpoint / "config.json")) == num_tokens


def _arguments(kind: type) -> set[str]:
    """Return the keys that the class writes, or reads from earlier releases."""
    keys = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "config_keys", ())}  # type: ignore[misc]
    return keys - {"self", "args", "kwargs"} | set(getattr(kind, "config_key_renames", ()))


def test_every_key_of_the_installed_sentence_transformers_is_known(checkpoint: Path) -> None:
    """A key that a new release adds needs a decision: supported, rejected, or without effect."""
    from sentence_transformers.sentence_transformer.modules import pooling  # noqa: PLC0415 - a table of it
    from sentence_transformers.util import decorators  # noqa: PLC0415 - for its source

    assert set(MODULE_KEYS["Pooling"]) == _arguments(Pooling) | set(pooling._LEGACY_POOLING_MODE_KWARGS)
    for kind in (Dense, Normalize, Dropout):
        assert set(MODULE_KEYS[kind.__name__]) == _arguments(kind), kind
    renamed = re.findall(
        r'"(\w+)": "(?:\w+)_kwargs"', inspect.getsource(decorators.transformer_kwargs_decorator)
    )
    assert set(transformer_keys(checkpoint, EMBEDDING)) == {*_arguments(Transformer), *renamed, "cache_dir"}


def test_every_module_of_the_installed_sentence_transformers_is_known() -> None:
    served = {"Transformer", *MODULE_KEYS}
    abstract = {"Module", "InputModule"}
    rejected = {"Asym", "BoW", "CLIPModel", "CNN", "LSTM", "LayerNorm", "LogitScore", "Router"}
    rejected |= {"StaticEmbedding", "WeightedLayerPooling", "WordEmbeddings", "WordWeights"}
    assert {
        name for package in (embedder_modules, scorer_modules) for name in package.__all__
    } == served | abstract | rejected


def test_every_model_key_of_the_installed_sentence_transformers_is_known(saved: Path, reranker: Path) -> None:
    """Keys that are written, and keys that only the loading code mentions."""
    for model, task, directory in ((SentenceTransformer, EMBEDDING, saved), (CrossEncoder, SCORES, reranker)):
        source = inspect.getsource(model) + inspect.getsource(BaseModel)
        loaded = re.findall(r'model_config(?:\.get\(|\[)"(\w+)"|"(\w+)" in model_config\b(?!\[)', source)
        keys = {name for names in loaded for name in names if name} | set(read(directory / MODEL))
        assert keys == set(MODEL_KEYS[task])
    source = inspect.getsource(BaseModel)
    written = re.search(r"module_config = {(.*)}", source)
    assert written is not None
    loaded = re.findall(r'module_config(?:\.get\(|\[)"(\w+)"', source)
    assert set(ENTRY_KEYS) == {*loaded, *re.findall(r'"(\w+)":', written[1])}
