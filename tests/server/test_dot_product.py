"""Models that compare embeddings by the dot product, as their publisher does."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import SIMILARITY_DOT
from attnlens_cli.commands.asking.compare import compare
from attnlens_cli.commands.asking.info import info
from attnlens_cli.show.as_json import comparison_as_json
from attnlens_cli.show.first_look import print_similarities
from attnlens_client import Client
from attnlens_client.pages import TextOptions, result_page
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.claims import check_claims
from attnlens_export.parity.grid import small_grid
from attnlens_model import read_config
from published_layouts import edit, mean_with_prompts
from served import ServerProcess

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

A, B = "The engineers read the report twice.", "A red cat sleeps there."
METHODS: Any = ["contributions", "output_share", "leave_one_out"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dot") / "source"
    mean_with_prompts(directory)
    edit(directory / "config_sentence_transformers.json", similarity_fn_name="dot", default_prompt_name=None)
    return directory


@pytest.fixture(scope="module")
def bundle(source: Path) -> Path:
    options = ExportOptions(grid=small_grid(16), faithfulness=False, comparison=True)
    export_bundle(source, source.parent / "bundle", options)
    return source.parent / "bundle"


@pytest.fixture(scope="module")
def address(bundle: Path) -> Iterator[str]:
    with ServerProcess(bundle) as server:
        yield server.address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client


@pytest.fixture(scope="module")
def reference(source: Path) -> Any:
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - slow

    return SentenceTransformer(str(source), device="cpu")


def test_export_compares_the_function_and_its_results(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.similarity == SIMILARITY_DOT
    figures = {figure.result: figure for figure in manifest.publisher.figures}
    assert figures["similarity"].max_abs_error == 0
    assert figures["similarities"].num_texts > 10
    assert 0 < figures["similarities"].max_abs_error <= figures["similarities"].limit
    assert check_claims(bundle, manifest, read_config(bundle / "config.json")) == ()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("level", ["tokens", "words"])
def test_scores_and_matrices_add_up_to_the_publishers_similarity(
    pooling: Any, level: Any, client: Client, reference: Any
) -> None:
    reference[1].pooling_mode = pooling
    try:
        expected = float(reference.similarity(*reference.encode([A, B]))[0, 0])
    finally:
        reference[1].pooling_mode = "mean"
    assert abs(expected) > 2
    for matrix in ("output", "input"):
        found = client.compare(A, B, matrix=matrix, methods=METHODS, level=level, pooling=pooling)
        assert (found.function, found.function_label) == ("dot", "dot product")
        assert found.similarity == pytest.approx(expected, rel=1e-5)
        assert found.matrix is not None
        total = found.matrix.sum() + (found.baseline or 0)
        total += sum(part.sum() for part in (found.baseline_row, found.baseline_column) if part is not None)
        assert total == pytest.approx(expected, rel=1e-4)
        for side in (found.a, found.b):
            assert side.target_value == pytest.approx(expected, rel=1e-5)
            for scores in side.scores[:2]:
                assert scores.sum == pytest.approx(expected, rel=1e-4)


def test_effects_of_tokens_are_those_on_the_dot_product(client: Client, reference: Any) -> None:
    """The publisher's model without one token in the attention and in the mean."""
    features = reference.preprocess([A])
    ids, types = features["input_ids"], features["token_type_ids"]
    embedding, other = (vector.astype(np.float64) for vector in reference.encode([A, B]))
    removed = []
    for token in range(1, ids.shape[1] - 1):
        mask = torch.ones_like(ids)
        mask[0, token] = 0
        with torch.inference_mode():
            hidden = reference[0].auto_model(ids, mask, types).last_hidden_state[0]
        removed.append(hidden[mask[0] == 1].mean(dim=0).numpy())
    found = client.compare(A, B, methods="leave_one_out", matrix="interaction")
    effects = found.a.by("leave_one_out").values[1:-1]
    np.testing.assert_allclose(effects, (embedding - np.array(removed)) @ other, atol=1e-3)
    assert found.matrix is not None
    assert np.isnan(found.matrix[0]).all()
    mirrored = client.compare(A, A, methods="leave_one_out", matrix="interaction").matrix
    assert mirrored is not None
    differences = embedding - np.array(removed)
    np.testing.assert_allclose(mirrored[1:-1, 1:-1], differences @ differences.T, atol=1e-3)


def test_clients_name_the_function(client: Client) -> None:
    assert client.get_model().similarity == "dot"
    found = client.compare(A, B)
    assert comparison_as_json(found)["similarity_function"] == "dot"
    assert f"dot product {found.similarity:.4f}" in found._repr_html_()


def test_commands_print_the_dot_product(address: str, client: Client) -> None:
    result = CliRunner().invoke(compare, [A, B, "--matrix", "input", "--address", address])
    assert result.exit_code == 0, result.output
    similarity = f"dot product {client.compare(A, B).similarity:.4f}"
    assert result.output.splitlines()[0].endswith(similarity)
    assert "the dot product is" in result.output
    described = CliRunner().invoke(info, ["--address", address])
    assert "similarity                       dot product" in described.output
    vectors = client.embed([A, B])
    console = Console(record=True, width=80)
    looks: list[Any] = [
        SimpleNamespace(text=text, vector=row) for text, row in zip([A, B], vectors, strict=True)
    ]
    print_similarities(console, looks, client.get_model().similarity)
    assert f"{vectors[0] @ vectors[1]:.4f}"[:5] in console.export_text()
    page = result_page(client, client.get_model(), [A, B], TextOptions(), comparison=client.compare(A, B))
    assert page.texts[0].scores[0].target == "the dot product with the other text"
