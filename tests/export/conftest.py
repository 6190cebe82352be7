"""Small encoders for the exporter's tests, each traced once."""

import dataclasses
from pathlib import Path

import pytest

from attnlens_export import ExportOptions, bundle
from attnlens_export.graph.trace import TracedGraph, trace
from attnlens_export.parity.grid import small_grid
from attnlens_model import Encoder, EncoderConfig, new_encoder
from configs import small_config


@pytest.fixture(scope="session")
def tiny_config() -> EncoderConfig:
    return small_config()


@pytest.fixture(scope="session")
def tiny_encoder(tiny_config: EncoderConfig) -> Encoder:
    return new_encoder(tiny_config, seed=0)


@pytest.fixture(scope="session")
def tiny_trace(tiny_config: EncoderConfig, tiny_encoder: Encoder) -> TracedGraph:
    return trace(tiny_encoder, tiny_config)


@pytest.fixture(scope="session")
def quick(tiny_trace: TracedGraph) -> ExportOptions:
    """Exports of `tiny_config` with seed 0 on a small grid, with the trace that exists: one takes seconds."""
    return ExportOptions(grid=small_grid(40), tracer=lambda *_: tiny_trace)


@pytest.fixture(scope="session")
def broken(quick: ExportOptions, tiny_trace: TracedGraph) -> ExportOptions:
    """The same with a graph in which one weight of layer 1 differs from the encoder's."""
    weights = dict(tiny_trace.weights)
    name = "layers.1.attention.query.weight.T"
    weights[name] = weights[name].copy()
    weights[name][3, 5] += 1.0
    return dataclasses.replace(quick, tracer=lambda *_: dataclasses.replace(tiny_trace, weights=weights))


@pytest.fixture
def traced_once(tiny_trace: TracedGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the command line, which has no option for it."""
    monkeypatch.setattr(bundle, "trace", lambda *_: tiny_trace)


@pytest.fixture
def broken_trace(broken: ExportOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise."""
    monkeypatch.setattr(bundle, "trace", broken.tracer)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A directory to export to, alone in its parent."""
    parent = tmp_path / "bundles"
    parent.mkdir()
    return parent / "tiny"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint's directory, empty."""
    directory = tmp_path / "source"
    directory.mkdir()
    return directory
