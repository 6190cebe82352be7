"""A server for the clients, and its vectors over gRPC."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnlens_client import Client
from clients_http import server_under_test as constants
from clients_http.server_under_test import Server
from served import ServerProcess


@pytest.fixture(scope="session")
def heads(classifier_bundle: Callable[[str], Path]) -> Iterator[dict[str, Any]]:
    """Return the attributes of `Server` that belong to a running reranker and a running classifier."""
    with (
        ServerProcess(classifier_bundle("reranker"), *constants.ARGUMENTS) as reranker,
        ServerProcess(classifier_bundle("topics"), *constants.ARGUMENTS) as classifier,
        Client(reranker.address) as scorer,
        Client(classifier.address) as labeler,
    ):
        ranked = scorer.rerank(constants.RERANK_QUERY, constants.DOCUMENTS, activation="sigmoid")
        yield {
            "reranker_url": reranker.http_url().rstrip("/"),
            "classifier_url": classifier.http_url().rstrip("/"),
            "ranking": [(each.index, each.score) for each in ranked],
            "labels": labeler.classify([constants.RERANK_QUERY]).top()[0],
        }


@pytest.fixture(scope="session")
def server_file(
    minilm_bundle: Path, heads: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Return a JSON file with running servers, as attributes of `Server`."""
    texts, many, some = constants.TEXTS, constants.MANY, constants.SOME
    with ServerProcess(minilm_bundle, *constants.ARGUMENTS) as process, Client(process.address) as client:
        encoded = client.encode(texts, last_hidden_state=True)
        vectors: dict[str, Any] = {
            "query": client.embed([constants.QUERY]),
            "texts": client.embed(texts),
            "many": client.embed(many),
            "some": client.embed(some),
            "long": client.embed([constants.LONG], truncate=True),
            "short": client.embed(texts, dimensions=constants.DIMENSIONS),
            "raw": client.embed(texts, normalize=False),
            "tokens": [np.asarray(text.last_hidden_state) for text in encoded],
        }
        lists = {name: [row.tolist() for row in rows] for name, rows in vectors.items()}
        server = Server(process.http_url().rstrip("/"), client.get_model().name, lists, **heads)
        path = tmp_path_factory.mktemp("clients") / "server.json"
        path.write_text(json.dumps(asdict(server)), encoding="utf-8")
        yield path
