"""Settings outside `tokenizer.json` that change a text's tokens, compared with sentence-transformers."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from attnlens_client import AttnlensError, EncodedText
from attnlens_export import ExportOptions, SourceError, export_bundle
from attnlens_export.graph.trace import TracedGraph, trace
from attnlens_export.parity.grid import small_grid
from attnlens_model import CheckpointError, load_checkpoint
from attnlens_server import local
from odd_models import OddModel
from small_files import write, write_pooling_files

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

MAX_TOKENS = 12
SPECIAL = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
WORDS = ("the", "The", "THE", "cat", "Cat", "##s", "##S", "in", "In", "Rome", "rome", "i", "İ", ".")
ENCODER = OddModel("Bert", {"num_hidden_layers": 1, "max_position_embeddings": 34})
TEXTS = ["The Cats in Rome.", "the cats in rome.", "THE CAT", "In İ i", ""]
LONG_TEXTS = ["the cat in Rome . " * 4 + "The Cats", "The " + "cats " * 9, "Rome."]

NORMALIZERS: dict[str, normalizers.Normalizer | None] = {
    "none": None,
    "cased": normalizers.BertNormalizer(lowercase=False),
    "sequence": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]),
    "lowercases last": normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
}

Files = Mapping[str, Mapping[str, object]]
"""The content of JSON files by name; it is added to the usual one."""


class Exported:
    """A checkpoint in sentence-transformers, and the bundle of it in our server and in theirs."""

    def __init__(self, checkpoint: Path, bundle: Path) -> None:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow

        self.bundle = bundle
        self._theirs = SentenceTransformer(str(checkpoint), device="cpu")
        # The bundle's tokenizer and settings with weights that sentence-transformers opens without optimum.
        shutil.copy(checkpoint / "model.safetensors", bundle)
        self._theirs_of_bundle = SentenceTransformer(str(bundle), device="cpu")

    def check(self, texts: Sequence[str], **options: Any) -> None:
        with local(self.bundle) as model:
            ours = model.embed(texts, truncate=True, **options)
        np.testing.assert_allclose(ours, self._embeddings(self._theirs, texts, options), atol=1e-5)
        np.testing.assert_allclose(ours, self._embeddings(self._theirs_of_bundle, texts, options), atol=1e-5)

    def tokens(self, text: str) -> EncodedText:
        with local(self.bundle) as model:
            [encoded] = model.encode([text], attention=None, truncate=True)
        return encoded

    @staticmethod
    def _embeddings(model: Any, texts: Sequence[str], options: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        embeddings: npt.NDArray[np.float32] = model.encode(list(texts), **options)
        return embeddings


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("encoder")
    ENCODER.make().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def traced(encoder: Path) -> TracedGraph:
    checkpoint = load_checkpoint(encoder)
    return trace(checkpoint.encoder, checkpoint.config)


@pytest.fixture
def export(encoder: Path, traced: TracedGraph, tmp_path: Path) -> Callable[..., Exported]:
    def export(
        files: Files | None = None,
        normalizer: normalizers.Normalizer | None = None,
        side: str = "right",
        **options: Any,
    ) -> Exported:
        checkpoint = tmp_path / "checkpoint"
        write_checkpoint(checkpoint, encoder, make_tokenizer(normalizer, side), files or {})
        usual: dict[str, Any] = {"faithfulness": False, "grid": small_grid(MAX_TOKENS)}
        chosen = ExportOptions(tracer=lambda *_: traced, **usual | options)
        export_bundle(checkpoint, tmp_path / "bundle", chosen)
        return Exported(checkpoint, tmp_path / "bundle")

    return export


def make_tokenizer(normalizer: normalizers.Normalizer | None, side: str) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate((*SPECIAL.values(), *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    template: Any = processors.TemplateProcessing
    tokenizer.post_processor = template(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.enable_truncation(MAX_TOKENS, direction=side)
    return tokenizer


def write_checkpoint(directory: Path, encoder: Path, tokenizer: Tokenizer, files: Files) -> None:
    shutil.copytree(encoder, directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_pooling_files(directory, 96)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_TOKENS} | SPECIAL
    for name, content in {"tokenizer_config.json": {}, **files}.items():
        usual = settings if name == "tokenizer_config.json" else {}
        write(directory / name, {**usual, **content})


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, "sentence_bert_config.json") for kind in NORMALIZERS]
    + [("none", "sentence_roberta_config.json")],
)
def test_texts_are_lowercased_where_sentence_transformers_lowercases_them(
    kind: str, name: str, export: Callable[..., Exported]
) -> None:
    exported = export({name: {"do_lower_case": True, "max_seq_length": 10}}, NORMALIZERS[kind])
    exported.check(TEXTS)
    exported.check(LONG_TEXTS)
    exported.check(["Cats"], prompt="The ")
    tokens = exported.tokens(TEXTS[0]).tokens
    assert [token.text for token in tokens] == ["[CLS]", "the", "cat", "##s", "in", "rome", ".", "[SEP]"]
    assert [TEXTS[0][token.char_start : token.char_end] for token in tokens[1:4]] == ["The", "Cat", "s"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"do_lower_case": False}, ["The", "Cat"]),
        ({"do_lower_case": True}, ["the", "cat"]),
        ({}, ["the", "cat"]),
        ({"do_lower_case": False, "strip_accents": True}, ["The", "Cat"]),
    ],
)
def test_arguments_of_a_bert_class_win_over_its_tokenizer_json(
    settings: dict[str, bool], expected: list[str], export: Callable[..., Exported]
) -> None:
    """In transformers, these arguments override the normalizer, also by their defaults."""
    classes = {"tokenizer_class": "BertTokenizer"}
    files = {"tokenizer_config.json": classes | settings}
    exported = export(files, NORMALIZERS["cased"], tokenizer="transformers")
    exported.check(TEXTS)
    assert [token.text for token in exported.tokens("The Cat").tokens[1:3]] == expected


def test_texts_keep_their_case_by_default(export: Callable[..., Exported]) -> None:
    exported = export({"sentence_bert_config.json": {"do_lower_case": False}})
    exported.check(TEXTS)
    assert [token.text for token in exported.tokens("The Cats").tokens[1:3]] == ["The", "Cat"]


@pytest.mark.parametrize(
    ("side", "settings", "expected"),
    [
        ("right", {"truncation_side": "left"}, "left"),
        ("left", {}, "left"),
        ("left", {"truncation_side": "right"}, "right"),
        ("right", {}, "right"),
    ],
)
def test_long_texts_are_truncated_on_the_side_that_sentence_transformers_truncates(
    side: str, settings: dict[str, str], expected: str, export: Callable[..., Exported]
) -> None:
    exported = export({"tokenizer_config.json": settings}, side=side)
    exported.check(LONG_TEXTS)
    exported.check(LONG_TEXTS, prompt="In Rome . ")
    encoded = exported.tokens(LONG_TEXTS[0])
    assert (len(encoded.tokens), encoded.num_tokens_total) == (MAX_TOKENS, 25)
    words = [LONG_TEXTS[0][token.char_start : token.char_end] for token in encoded.tokens[1:-1]]
    all_words = ["the", "cat", "in", "Rome", "."] * 4 + ["The", "Cat", "s"]
    assert words == (all_words[-10:] if expected == "left" else all_words[:10])
    ids = [token.id for token in encoded.tokens]
    with local(exported.bundle) as model:
        [kept] = model.encode([[*ids[:6], *ids]], attention=None, truncate=True)
        # Only ids that truncation removes are not validated.
        first, last = [10**6, *ids], [*ids, 10**6]
        removed, used = (first, last) if expected == "left" else (last, first)
        model.encode([removed], attention=None, truncate=True)
        with pytest.raises(AttnlensError, match="is 1000000: use 0 to 299"):
            model.encode([used], attention=None, truncate=True)
    assert [token.id for token in kept.tokens] == (ids if expected == "left" else [*ids[:6], *ids[:6]])


@pytest.mark.parametrize("content", ["{}", "version https://git-lfs.github.com/spec/v1\n"])
def test_broken_tokenizer_is_found_before_tracing(content: str, encoder: Path, tmp_path: Path) -> None:
    def trace(*_: object) -> TracedGraph:
        raise AssertionError

    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, encoder, make_tokenizer(None, "right"), {})
    (checkpoint / "tokenizer.json").write_text(content)
    with pytest.raises(
        (SourceError, CheckpointError), match=r"tokenizer\.json is (not a tokenizer|a Git LFS)"
    ):
        export_bundle(checkpoint, tmp_path / "bundle", ExportOptions(tracer=trace))


def test_export_without_a_tokenizer_ends_with_a_warning(
    encoder: Path, traced: TracedGraph, tmp_path: Path
) -> None:
    stages: list[str] = []
    options = ExportOptions(faithfulness=False, pooling="mean", grid=small_grid(7), tracer=lambda *_: traced)
    summary = export_bundle(encoder, tmp_path / "bundle", options, lambda stage, *_: stages.append(stage))
    assert summary.warnings[0].startswith(
        f"{encoder.name} has no tokenizer: the bundle accepts only token ids."
    )
    assert stages[0] == "Loading the weights"


def test_nothing_is_loaded_of_a_directory_without_a_configuration(tmp_path: Path) -> None:
    stages: list[str] = []
    with pytest.raises(CheckpointError, match=r"contains no config\.json"):
        export_bundle(tmp_path, tmp_path / "b", ExportOptions(), lambda stage, *_: stages.append(stage))
    assert stages == []
