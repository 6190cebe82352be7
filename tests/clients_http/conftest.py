"""A server for the clients, and its vectors over gRPC."""

import json
from collections.abc import Iterator
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
def server_file(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a JSON file with a running `Server`, the texts of its vectors and how to overload it."""
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
        server = Server(process.http_url().rstrip("/"), client.get_model().name, lists)
        path = tmp_path_factory.mktemp("clients") / "server.json"
        path.write_text(json.dumps(asdict(server)), encoding="utf-8")
        yield path
