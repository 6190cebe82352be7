"""A result with NaN is an error on every route and method."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from attnlens_client import AttentionQuery, AttentionReduction, AttnlensError
from attnlens_server import Local, local
from mounted import Mounted
from tampered import EMBEDDINGS, copy_of, put_hashes_right

BAD, GOOD = "q q q", "a b"
BOTH = [GOOD, BAD]
EMBEDDING_BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": BOTH},
    "/embeddings": {"input": BAD},
    "/v1/attnlens/embed": {"inputs": BOTH},
    "/v1/attnlens/encode": {"inputs": BOTH},
    "/v1/attnlens/explain": {"inputs": BOTH},
    "/v1/attnlens/compare": {"pairs": [{"a": GOOD, "b": BAD}]},
    "/v1/attnlens/attention": {"inputs": BOTH},
    "/": {"inputs": BOTH},
    "/embed": {"inputs": BOTH},
    "/embed_all": {"inputs": BOTH},
    "/similarity": {"inputs": {"source_sentence": GOOD, "sentences": [BAD]}},
    "/v2/embed": {"texts": BOTH, "input_type": "search_document", "embedding_types": ["int8"]},
    "/vectors": {"text": BAD},
    "/vectors/": {"texts": BOTH},
    "/api/embed": {"input": BOTH},
}
RANK = {"query": GOOD, "documents": BOTH}
SCORE_BODIES: dict[str, dict[str, Any]] = {
    "/v1/attnlens/score": RANK,
    "/rerank": {"query": GOOD, "texts": BOTH},
    "/v1/rerank": RANK,
    "/v2/rerank": RANK,
    "/score": {"text_1": GOOD, "text_2": BOTH},
    "/v1/score": {"text_1": GOOD, "text_2": BOTH},
    "/predict": {"inputs": [[GOOD, BAD]]},
}
NO_RESULTS = {"/v1/attnlens/tokenize", "/tokenize", "/decode"}
NOT_SUPPORTED = {"/embed_sparse", "/classify", "/v1/attnlens/classify"}
STREAMS_AND_PAGES = {"/v1/attnlens/encode_stream", "/page"}  # the status is sent before the results


def spoil(bundle: Path) -> Path:
    """Make the embedding of the token "q" NaN. All graphs use the weights of the main graph."""
    vocabulary = [line.strip() for line in (bundle / "vocab.txt").read_text().splitlines()]
    path = bundle / EMBEDDINGS
    model = onnx.load(path)
    [table] = [
        array
        for array in map(numpy_helper.to_array, model.graph.initializer)
        if array.shape[:1] == (len(vocabulary),) and array.ndim == 2
    ]
    row = table[vocabulary.index("q")].tobytes()
    content = path.read_bytes()
    assert content.count(row) == 1
    path.write_bytes(content.replace(row, np.full(table.shape[1], np.nan, "<f4").tobytes()))
    put_hashes_right(bundle)
    return bundle


@pytest.fixture(scope="module")
def spoiled(small_bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoil(copy_of(small_bundle("wordpiece"), tmp_path_factory.mktemp("spoiled")))


@pytest.fixture(scope="module")
def spoiled_app(spoiled: Path) -> Iterator[Mounted]:
    with Mounted(spoiled) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def spoiled_model(spoiled: Path) -> Iterator[Local]:
    with local(spoiled, threads=1) as model:
        yield model


def check_routes(mounted: Mounted, bodies: dict[str, dict[str, Any]]) -> None:
    for path, body in bodies.items():
        response = mounted.ask("POST", path, body)
        assert (path, response.status) == (path, 500), response.body
        assert b"NaN or infinity" in response.body
        assert b"error id" not in response.body


def test_routes_for_embeddings_and_attention_return_an_error(spoiled_app: Mounted) -> None:
    check_routes(spoiled_app, EMBEDDING_BODIES)
    assert b"inputs[1] has NaN" in spoiled_app.ask("POST", "/v1/attnlens/embed", {"inputs": BOTH}).body
    app: Any = spoiled_app.model._app
    posts = {path for path, methods in app._paths.items() if "POST" in methods}
    covered = EMBEDDING_BODIES.keys() | SCORE_BODIES.keys() | NO_RESULTS | NOT_SUPPORTED | STREAMS_AND_PAGES
    assert posts == covered


def test_routes_for_scores_return_an_error(classifier_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    with Mounted(spoil(copy_of(classifier_bundle("reranker"), tmp_path))) as mounted:
        check_routes(mounted, SCORE_BODIES)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.embed(BOTH),
        lambda model: model.embed(BOTH, embedding_type="binary"),
        lambda model: model.encode(BOTH),
        lambda model: model.encode(BOTH, attention=AttentionQuery(layers=[0])),
        lambda model: model.encode(
            BOTH, attention=AttentionQuery(reduction=AttentionReduction(level="words"))
        ),
        lambda model: list(model.encode_stream(BOTH)),
        lambda model: list(model.encode_stream(BOTH, attention=AttentionQuery())),
        lambda model: model.explain([BAD]),
        lambda model: model.explain([BAD], methods=["leave_one_out"]),
        lambda model: model.compare(GOOD, BAD),
    ],
)
def test_methods_return_an_error(spoiled_model: Local, call: Callable[[Local], object]) -> None:
    with pytest.raises(AttnlensError, match="NaN or infinity in its result") as caught:
        call(spoiled_model)
    assert caught.value.reason == "INTERNAL"
    spoiled_model.embed([GOOD])
