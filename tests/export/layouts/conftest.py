"""Fixtures of the layout tests."""

from pathlib import Path
from typing import Any

import pytest

from attnlens_export import ExportOptions, export_bundle
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.layouts import write_layout
from attnlens_export.parity.grid import small_grid
from attnlens_model import EncoderConfig


@pytest.fixture(scope="module")
def triton(minilm_bundle: Path) -> Path:
    # Next to the bundle, because hard links require one file system.
    return write_layout(
        minilm_bundle, "triton", minilm_bundle.with_name("minilm-triton"), link=True
    ).directory


@pytest.fixture(scope="module")
def ovms(minilm_bundle: Path) -> Path:
    return write_layout(minilm_bundle, "ovms", minilm_bundle.with_name("minilm-ovms"), link=True).directory


@pytest.fixture(scope="module")
def tiny_bundle(
    tiny_config: EncoderConfig, tiny_trace: TracedGraph, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return export_tiny(tiny_config, tiny_trace, tmp_path_factory.mktemp("bundles") / "tiny")


def export_tiny(config: EncoderConfig, traced: TracedGraph, output: Path, **options: Any) -> Path:
    chosen = ExportOptions(name="tiny", grid=small_grid(40), tracer=lambda *_: traced, **options)
    export_bundle(config, output, chosen)
    return output
