"""Exported files of a checkpoint, compared with sentence-transformers, which wrote the checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from attnlens.bundle import embedding_size
from attnlens_export import BundleSummary, ExportOptions, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.int8.texts import Embedder, make_batches
from attnlens_export.layouts import write_layout
from attnlens_export.parity.grid import small_grid
from attnlens_export.parity.sessions import open_session
from attnlens_model import read_config
from small_bundles import MODELS, TOKENIZERS

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

GRID = small_grid(32)
TEXTS = ["A cat.", "It rained, so it was wet.", "word " * 20, ""]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder of which 8 of 24 components are kept, behind a dense layer and scaling."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow
    from sentence_transformers.base.modules import Dense, Normalize, Transformer  # noqa: PLC0415 - slow
    from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: PLC0415 - slow

    directory = tmp_path_factory.mktemp("truncated")
    MODELS["wordpiece"].make().save_pretrained(directory / "encoder")
    special = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")}
    load: Any = transformers.PreTrainedTokenizerFast
    tokenizer = load(
        tokenizer_file=str(TOKENIZERS / "wordpiece" / "tokenizer.json"), model_max_length=34, **special
    )
    tokenizer.save_pretrained(directory / "encoder")
    modules = [Transformer(str(directory / "encoder")), Pooling(96, "cls"), Dense(96, 24), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", truncate_dim=8)
    model.save(str(directory / "saved"))
    return directory / "saved"


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> BundleSummary:
    return export_bundle(checkpoint, tmp_path_factory.mktemp("bundles") / "cut", ExportOptions(grid=GRID))


def test_bundle_keeps_the_same_components_as_the_publisher(checkpoint: Path, exported: BundleSummary) -> None:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow

    theirs = SentenceTransformer(str(checkpoint), device="cpu")
    assert exported.manifest.pooling.truncate_dim == 8
    assert embedding_size(exported.manifest) == theirs.get_embedding_dimension() == 8
    assert exported.decisions == (
        (
            "embeddings: cls over the tokens; dense 96 -> 24 (tanh); scaled to length 1; truncated; 8 "
            "components (as in the checkpoint)"
        ),
        "prompts: document '', query ''",
        "maximum input: 34 tokens, the limit of the encoder",
        f"tokenizer: TokenizersBackend of transformers {transformers.__version__}, equal to tokenizer.json",
    )
    assert check_bundle(exported.directory, grid=GRID).verdict.passed

    config = read_config(exported.directory / "config.json")
    batches = make_batches(TEXTS, exported.directory / "tokenizer.json", config, 34)
    embedder = Embedder(exported.directory, exported.manifest.pooling, 96, batches)
    found = embedder.run(open_session(exported.directory / "onnx" / "model.onnx")).embeddings
    expected = theirs.encode(TEXTS)
    assert expected.shape == (4, 8)
    assert np.linalg.norm(expected, axis=1).max() < 1  # theirs are cut behind the scaling, ours scaled again
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_layout_states_the_number_of_kept_components(exported: BundleSummary, tmp_path: Path) -> None:
    write_layout(exported.directory, "triton", tmp_path / "models")
    page = (tmp_path / "models" / "README.md").read_text("utf-8")
    assert "normalized to unit length; only its first 8 components are used." in page
