"""A small bundle for every runtime."""

from pathlib import Path

import pytest

from attnlens_export import ExportOptions, export_bundle
from attnlens_export.parity.grid import small_grid
from configs import small_config

CONFIG = small_config(
    {
        "embeddings.vocab_size": 101,
        "hidden_size": 48,
        "num_layers": 2,
        "attention.num_heads": 4,
        "feed_forward.intermediate_size": 56,
        "positions.max_position_embeddings": 40,
    }
)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh encoder, exported."""
    directory = tmp_path_factory.mktemp("runtimes") / "tiny"
    export_bundle(CONFIG, directory, ExportOptions(grid=small_grid(40)))
    return directory
