"""The server returns the same vectors as sentence-transformers, whose file format the exporter reads."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import BertConfig, BertModel

from attnlens.bundle import BundleError, read_manifest
from attnlens.tensors import from_tensor
from attnlens_cli.commands.asking.embed import embed
from attnlens_cli.commands.asking.info import info
from attnlens_client import Client, InputTooLongError, InvalidRequestError
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.embedding_ranges import MAX_TEXT_TOKENS
from attnlens_export.int8.texts import read_kinds
from attnlens_export.parity.grid import Case, Padding
from served import ServerProcess

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

GRID = [Case(1, 7, Padding.NONE), Case(2, 7, Padding.RIGHT)]
MODES = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "last_token": "lasttoken",
    "weighted_mean": "weightedmean",
    "mean_sqrt_length": "mean_sqrt_len_tokens",
}
PROMPTS = {"query": "Given a question, find its answer: ", "passage": "passage: ", "document": ""}
TEXTS = [
    "The animal didn't cross the street because it was too tired.",
    "",
    "Zoë's café in 東京 😀",
    "word " * 100,
    "A short one.",
]


def open_reference(directory: Path) -> Any:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow import

    return SentenceTransformer(str(directory), device="cpu")


@pytest.fixture(scope="module")
def checkpoint(minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small, randomly initialized encoder with MiniLM's tokenizer, dense layers and excluded prompts."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow import
    from sentence_transformers.base.modules import Dense, Normalize, Transformer  # noqa: PLC0415 - slow import
    from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: PLC0415 - slow import

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("checkpoint")
    sizes: dict[str, Any] = {"vocab_size": 30522, "hidden_size": 32, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    model: Any = BertModel(BertConfig(**sizes, initializer_range=0.2))
    model.save_pretrained(directory / "encoder")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(minilm_dir / name, directory / "encoder" / name)
    dense = [
        Dense(32, 24, activation_function=torch.nn.Tanh()),
        Normalize(),
        Dense(24, 40, bias=False, activation_function=torch.nn.GELU()),
        Dense(40, 48, activation_function=torch.nn.Identity()),
        Normalize(),
    ]
    pooling = Pooling(32, "weightedmean", include_prompt=False)
    modules = [Transformer(str(directory / "encoder"), max_seq_length=48), pooling, *dense]
    SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS, default_prompt_name="passage").save(
        str(directory / "saved")
    )
    return directory / "saved"


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bundles") / "dense"
    export_bundle(checkpoint, directory, ExportOptions(grid=GRID))
    return directory


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[Client]:
    with ServerProcess(bundle) as server, Client(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return open_reference(checkpoint)


def test_prompts_dense_layers_and_pooling_match_sentence_transformers(client: Client, reference: Any) -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"prompt_name": "query"},
        {"prompt_name": "document"},
        {"prompt": "title: none | "},
        {"prompt": ""},
    ]
    for choice in choices:
        options: dict[str, Any] = {**choice, "truncate": True}
        found = client.embed(TEXTS, **options)
        assert found.shape == (5, 48)
        np.testing.assert_allclose(found, reference.encode(TEXTS, **choice), atol=1e-5, err_msg=str(choice))


@pytest.mark.parametrize("pooling", MODES)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_each_requested_pooling_passes_through_the_dense_layers(
    pooling: Any, include_prompt: bool, client: Client, reference: Any
) -> None:
    """Excluding prompt tokens only matters if there is a prompt."""
    reference[1].pooling_mode, reference[1].include_prompt = MODES[pooling], include_prompt
    prompt = "" if include_prompt else PROMPTS["query"]
    try:
        expected = reference.encode(TEXTS, prompt=prompt)
    finally:
        reference[1].pooling_mode, reference[1].include_prompt = "weightedmean", False
    found = client.embed(TEXTS, pooling=pooling, prompt=prompt, truncate=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("pooling", MODES)
def test_each_pooling_of_minilm_matches_sentence_transformers(
    pooling: Any, minilm_server: ServerProcess, minilm_dir: Path
) -> None:
    reference = open_reference(minilm_dir)
    reference[1].pooling_mode = MODES[pooling]
    del reference[2]
    with Client(minilm_server.address) as client:
        found = client.embed(TEXTS, pooling=pooling, normalize=False, prompt="query: ", truncate=True)
    np.testing.assert_allclose(found, reference.encode(TEXTS, prompt="query: "), atol=1e-5)


def test_sentence_transformers_loads_the_bundle_with_the_same_vectors_and_prompts(
    bundle: Path, checkpoint: Path, reference: Any, tmp_path: Path
) -> None:
    """sentence-transformers uses PyTorch, so the encoder's weights are added to the bundle."""
    opened = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    shutil.copy(checkpoint / "model.safetensors", opened)
    model = open_reference(opened)
    assert (model.prompts, model.default_prompt_name) == (PROMPTS, "passage")
    np.testing.assert_allclose(model.encode(TEXTS), reference.encode(TEXTS), atol=1e-6)


def test_model_info_reports_width_dense_layers_and_prompts(client: Client) -> None:
    model = client.get_model()
    assert (model.hidden_size, model.embedding_size) == (32, 48)
    assert (model.pooling, model.normalize, model.exclude_prompt) == ("weighted_mean", True, True)
    assert (dict(model.prompts), model.default_prompt_name) == (PROMPTS, "passage")
    layers = [(layer.in_features, layer.out_features, layer.bias, layer.activation) for layer in model.dense]
    assert layers == [(32, 24, True, "tanh"), (24, 40, False, "gelu"), (40, 48, True, "identity")]
    assert [layer.normalize_input for layer in model.dense] == [False, True, False]


def test_dimensions_refer_to_the_last_layer_and_are_renormalized(client: Client) -> None:
    whole, cut = client.embed(TEXTS[:1]), client.embed(TEXTS[:1], dimensions=5)
    np.testing.assert_allclose(cut, whole[:, :5] / np.linalg.norm(whole[:, :5]), atol=1e-6)
    with pytest.raises(InvalidRequestError, match="dimensions is 49: use 1 to 48"):
        client.embed(TEXTS[:1], dimensions=49)
    assert client.embed([]).shape == (0, 48)


def test_dimensions_default_to_the_published_number(checkpoint: Path, tmp_path: Path) -> None:
    """By default, vectors are truncated after normalization, so their norm is below 1.

    Requested dimensions are renormalized.
    """
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    settings = json.loads((source / "config_sentence_transformers.json").read_text("utf-8"))
    (source / "config_sentence_transformers.json").write_text(json.dumps(settings | {"truncate_dim": 8}))
    export_bundle(source, tmp_path / "bundle", ExportOptions(grid=GRID))
    reference = open_reference(source)
    with ServerProcess(tmp_path / "bundle") as server, Client(server.address) as client:
        assert client.get_model().embedding_size == reference.get_embedding_dimension() == 8
        found = client.embed(TEXTS, truncate=True)
        assert found.shape == (5, 8)
        np.testing.assert_allclose(found, reference.encode(TEXTS), atol=1e-5)
        assert client.embed([]).shape == (0, 8)
        whole = client.embed(TEXTS, truncate=True, dimensions=48)
    np.testing.assert_allclose(whole, reference.encode(TEXTS, truncate_dim=48), atol=1e-5)


def test_exported_ranges_are_those_of_sentence_transformers(
    bundle: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default prompt, which pooling excludes, and dense layers."""
    ranges = read_manifest(bundle).embedding_ranges
    texts = [text for texts in read_kinds(None).values() for text in texts]
    assert ranges.num_texts == len(texts)
    prompt = reference.prompts[reference.default_prompt_name]
    num_prompt_tokens = len(reference.tokenizer(prompt).input_ids) - 1  # without the separator
    monkeypatch.setattr(reference, "max_seq_length", num_prompt_tokens + MAX_TEXT_TOKENS)
    embeddings = reference.encode(texts)
    expected = np.stack([embeddings.min(axis=0), embeddings.max(axis=0)])
    np.testing.assert_allclose(from_tensor(ranges.values), expected, atol=1e-5)


def test_prompt_tokens_count_and_token_ids_have_no_prompt(client: Client) -> None:
    [alone] = client.embed_with_usage(["A cat."], prompt="").usages
    [default] = client.embed_with_usage(["A cat."]).usages
    assert default.num_tokens == alone.num_tokens + 2  # `passage` and `:`
    ids = [token.id for token in client.tokenize(["A cat."], prompt="")[0].tokens]
    np.testing.assert_allclose(client.embed([ids]), client.embed(["A cat."], prompt=""), atol=1e-6)
    with pytest.raises(InvalidRequestError, match=r"token_ids cannot be combined with a prompt"):
        client.embed([ids], prompt_name="query")
    client.embed([ids], prompt_name="document")  # this prompt is an empty string


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"default_prompt_name": "query"},
            "default_prompt_name is 'query', but 'passage' according to the files",
        ),
        ({"prompts": {"query": "q"}}, r"prompts\.query is 'q', but 'Given"),
        (
            {"pooling": {"pooling": "POOLING_WEIGHTED_MEAN", "normalize": False}},
            r"pooling\.normalize is False, but True according to the files",
        ),
        (
            {"pooling": {"pooling": "POOLING_WEIGHTED_MEAN", "normalize": True, "dense": []}},
            r"pooling\.dense has 0 entries, but \d according to the files",
        ),
    ],
)
def test_manifest_that_contradicts_the_prompt_or_layer_files_is_rejected(
    change: dict[str, Any], message: str, bundle: Path, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    manifest = json.loads((copied / "manifest.json").read_text("utf-8"))
    (copied / "manifest.json").write_text(json.dumps(manifest | change), "utf-8")
    with pytest.raises(BundleError, match=message):
        check_bundle(copied, grid=GRID)


def test_check_compares_prompts_and_layers_with_the_files(bundle: Path) -> None:
    assert check_bundle(bundle, grid=GRID).verdict.passed


def test_modified_dense_weight_is_detected_by_its_hash(bundle: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    path = copied / "4_Dense" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"4_Dense/model\.safetensors was altered"):
        check_bundle(copied, grid=GRID)


def test_text_without_tokens_after_an_excluded_prompt_is_rejected(client: Client) -> None:
    """The prompt alone reaches the model's token limit."""
    message = "has no tokens except those of the prompt, which pooling excludes: shorten the prompt to fit 48"
    with pytest.raises(InvalidRequestError, match=message):
        client.embed(["A cat."], prompt="word " * 60, truncate=True)
    with pytest.raises(InputTooLongError, match=r"has \d+ tokens with the prompt, but the limit is 48"):
        client.embed(["A cat."], prompt="word " * 60)


def test_unknown_prompt_is_reported_with_the_available_names(client: Client) -> None:
    for texts in (["A cat."], []):
        with pytest.raises(InvalidRequestError, match=r"prompt_name is 'question'.*passage.*query"):
            client.embed(texts, prompt_name="question")
    with pytest.raises(InvalidRequestError, match=r"prompt_name is ''"):
        client.embed(["A cat."], prompt_name="")


def test_encode_and_tokenize_prepend_the_same_prompt(client: Client) -> None:
    """Offsets refer to the text itself, whatever the prompt."""
    [encoded], [tokenized] = client.encode(["A cat."]), client.tokenize(["A cat."])
    assert encoded.tokens == tokenized.tokens
    of_text = [token for token in encoded.tokens if token.source == "text"]
    assert [token.text for token in encoded.tokens] == ["[CLS]", "passage", ":", "a", "cat", ".", "[SEP]"]
    assert [(token.char_start, token.char_end) for token in of_text] == [(0, 1), (2, 5), (5, 6)]
    assert [token.source for token in encoded.tokens[1:3]] == ["prompt", "prompt"]
    assert (encoded.tokens[1].char_start, encoded.tokens[1].char_end) == (0, 7)
    [without] = client.encode(["A cat."], prompt="")
    assert [token.text for token in without.tokens] == ["[CLS]", "a", "cat", ".", "[SEP]"]


def test_prompt_with_invalid_unicode_is_a_usage_error(client: Client, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("A cat.\n")
    arguments = [str(tmp_path / "texts.txt"), "--address", str(client.address), "--prompt", "\udcff"]
    result = CliRunner().invoke(embed, arguments)
    assert result.exit_code == 2
    assert "'--prompt': it is not UTF-8" in result.stderr


def test_command_line_accepts_and_shows_prompts(client: Client, tmp_path: Path) -> None:
    def run(command: Any, *args: str) -> str:
        result = CliRunner().invoke(
            command, [*args, "--address", str(client.address)], env={"COLUMNS": "120"}
        )
        assert result.exit_code == 0, result.output
        return result.output

    shown = " ".join(run(info).split())
    assert "embedding size 48 embeddings weighted_mean" in shown
    assert "weighted_mean over the tokens without the prompt; dense 32 -> 24 (tanh); " in shown
    assert "passage: 'passage: ' (default)" in shown
    (tmp_path / "texts.txt").write_text("A cat.\n")
    for options in ({"prompt_name": "query"}, {"prompt": ""}, {"prompt": "about "}):
        args = [f"--{name.replace('_', '-')}={text}" for name, text in options.items()]
        run(embed, str(tmp_path / "texts.txt"), "-o", str(tmp_path / "vectors.npy"), *args)
        expected = client.embed(["A cat."], **options)  # type: ignore[arg-type]
        np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), expected, atol=1e-6)
