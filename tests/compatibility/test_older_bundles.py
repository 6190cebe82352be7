"""Bundles of commit 4f320570, from before exports were compared with the publisher, are served unchanged.

That commit exported them from `OddModel("Bert")` with the tokenizer `wordpiece`, and its server computed
`results.json`: an embedder with prompts and a Dense module, and a classifier with three labels.
"""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlens_server
from attnlens.bundle import read_manifest
from attnlens.published import OLDER, describe_comparison
from attnlens_export import check_bundle
from attnlens_export.parity.grid import small_grid
from small_files import read

COMMIT = "4f320570"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("older")
    with tarfile.open(Path(__file__).with_name(f"{COMMIT}.tar.xz")) as archive:
        archive.extractall(directory, filter="data")
    return directory / COMMIT


def assert_equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_embeddings_and_token_vectors_are_the_same(older: Path) -> None:
    results = read(older / "results.json")
    with attnlens_server.local(older / "embedder") as model:
        assert_equal(model.embed(results["texts"], truncate=True), results["embeddings"])
        [encoded] = model.encode(results["texts"][:1])
    assert_equal(encoded.last_hidden_state, results["token_vectors"])


def test_logits_and_scores_are_the_same(older: Path) -> None:
    results = read(older / "results.json")
    with attnlens_server.local(older / "classifier") as model:
        found = model.classify(results["texts"], truncate=True)
    assert_equal(found.logits, results["logits"])
    assert_equal(found.scores, results["scores"])


@pytest.mark.parametrize("name", ["embedder", "classifier"])
def test_check_passes_and_the_missing_comparison_is_stated(name: str, older: Path) -> None:
    assert check_bundle(older / name, grid=small_grid(3)).verdict.passed
    manifest = read_manifest(older / name)
    comparison = manifest.publisher if manifest.HasField("publisher") else None
    assert describe_comparison(comparison) == OLDER
