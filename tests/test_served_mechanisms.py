"""Sparse attention, end to end: a randomly initialized encoder, its bundle, a server and a client."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
import torch

import attnlens_server
from attnlens.bundle import read_manifest
from attnlens.oip import open_inference_pb2
from attnlens.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from attnlens.patterns import Band
from attnlens.v1.manifest_pb2 import OutputLayout
from attnlens_client import AttentionQuery, Client, InvalidRequestError
from attnlens_export import ExportOptions, check_bundle, export_bundle
from attnlens_export.parity.grid import Case, Padding, small_grid
from attnlens_model import Encoder, new_encoder
from mechanisms import mechanism_config
from served import ServerProcess

LENGTHS = (1, 3, 21, 60)
TEXTS = [list(range(2, 2 + length)) for length in LENGTHS]


class Served(NamedTuple):
    kind: str
    encoder: Encoder
    bundle: Path
    client: Client
    address: str

    def expected(self, ids: list[int]) -> list[np.ndarray]:
        """Output of each layer for a single text in PyTorch; for patterns, the rows."""
        with torch.inference_mode():
            mask = torch.ones(1, len(ids), dtype=torch.int64)
            output = self.encoder(torch.tensor([ids]), mask, output_attentions=True)
        return [weights[0].numpy() for weights in output.attentions]

    def dense(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """Convert the rows of a layer to dense weights (H, T, T)."""
        [output] = self.encoder.config.layer_outputs(layer)
        match output.pattern:
            case None:
                return rows
            case Band() as band:
                return band.dense(rows)
            case table:
                return table.at(rows.shape[1]).dense(rows)


@pytest.fixture(scope="module", params=["longformer", "big_bird"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model with three layers: the given kind, softmax, the given kind."""
    config = mechanism_config(request.param)
    bundle = tmp_path_factory.mktemp(request.param) / "bundle"
    grid = [*small_grid(16), Case(2, 64, Padding.RIGHT)]
    export_bundle(config, bundle, ExportOptions(seed=3, grid=grid))
    with ServerProcess(bundle) as server, Client(server.address) as client:
        yield Served(request.param, new_encoder(config, seed=3), bundle, client, server.address)


def test_bundle_specifies_the_attention_pattern(served: Served) -> None:
    manifest = read_manifest(served.bundle)
    first, second, third = (
        output for output in manifest.graphs[1].outputs if output.value.name.startswith("attentions.")
    )
    assert first.layout == third.layout != second.layout == OutputLayout.OUTPUT_LAYOUT_DENSE
    assert first.HasField("band") or first.HasField("block_table")
    assert not second.HasField("band")
    assert check_bundle(served.bundle, grid=small_grid(16)).verdict.passed


def test_text_gets_its_own_weights_in_sparse_and_dense_layout(served: Served) -> None:
    query = AttentionQuery(layers=[2, 0], heads=[2, 0])
    queries = [query, AttentionQuery(layers=[2, 0], heads=[2, 0], view="dense"), AttentionQuery(view="dense")]
    encoded = served.client.encode(TEXTS, attention=queries)
    streamed = list(served.client.encode_stream(TEXTS, attention=queries))
    for ids, *results in zip(TEXTS, encoded, streamed, strict=True):
        layers = served.expected(ids)
        for result in results:
            rows, dense, every = result.attention
            assert rows.layout == ("band" if served.kind == "longformer" else "blocks")
            assert (dense.layout, dense.patterns, len(rows.patterns)) == ("dense", (), 2)
            for place, layer in enumerate((2, 0)):
                np.testing.assert_allclose(rows.weights[place], layers[layer][[2, 0]], atol=1e-5)
                whole = served.dense(layer, layers[layer])[[2, 0]]
                np.testing.assert_allclose(rows.dense()[place], whole, atol=1e-5)
                np.testing.assert_array_equal(dense.weights[place], rows.dense()[place])
            for layer, weights in enumerate(every.weights):
                np.testing.assert_allclose(weights, served.dense(layer, layers[layer]), atol=1e-5)
            np.testing.assert_allclose(every.weights.sum(axis=-1), 1, atol=1e-5)


def test_open_inference_protocol_returns_padded_dense_weights(served: Served) -> None:
    ids = np.zeros((len(TEXTS), max(LENGTHS)), "<i8")
    for row, text in zip(ids, TEXTS, strict=True):
        row[: len(text)] = text
    request = open_inference_pb2.ModelInferRequest()
    for name in ("attentions.2", "attentions.1"):
        request.outputs.add(name=name)
    for name, values in (("input_ids", ids), ("attention_mask", (ids != 0).astype("<i8"))):
        request.inputs.add(name=name, datatype="INT64", shape=ids.shape)
        request.raw_input_contents.append(values.tobytes())
    with grpc.insecure_channel(served.address) as channel:
        response = GRPCInferenceServiceStub(channel).ModelInfer(request)
    for output, raw, layer in zip(response.outputs, response.raw_output_contents, (2, 1), strict=True):
        found = np.frombuffer(raw, "<f4").reshape(output.shape)
        query = AttentionQuery(layers=[layer], view="dense")
        for padded, result in zip(found, served.client.encode(TEXTS, attention=query), strict=True):
            size = result.weights.shape[-1]
            np.testing.assert_array_equal(padded[:, :size, :size], result.weights[0])
            assert np.count_nonzero(padded) == np.count_nonzero(result.weights)


def test_openvino_matches_onnx_runtime(served: Served) -> None:
    query = AttentionQuery(view="dense")
    with attnlens_server.local(served.bundle, engine="openvino", threads=2) as model:
        found = model.encode(TEXTS, attention=query)
        vectors = model.embed(TEXTS)
    np.testing.assert_allclose(vectors, served.client.embed(TEXTS), rtol=0, atol=1e-5)
    for ours, theirs in zip(found, served.client.encode(TEXTS, attention=query), strict=True):
        np.testing.assert_allclose(ours.weights, theirs.weights, rtol=0, atol=1e-5)


def test_mean_over_heads_matches_the_dense_weights(served: Served) -> None:
    mean = AttentionQuery(layers=[0, 2], view="head_mean")
    for ids, result in zip(TEXTS, served.client.encode(TEXTS, attention=mean), strict=True):
        layers = served.expected(ids)
        for place, layer in enumerate((0, 2)):
            whole = served.dense(layer, layers[layer]).mean(axis=0)
            np.testing.assert_allclose(result.attention[0].dense()[place, 0], whole, atol=1e-5)


def test_mixed_layouts_are_rejected_unless_dense_is_requested(served: Served) -> None:
    with pytest.raises(InvalidRequestError, match=r"attention\[0\].layers.*ATTENTION_VIEW_DENSE"):
        served.client.encode(TEXTS[:1], attention=AttentionQuery())


def test_stream_part_has_its_pattern(served: Served) -> None:
    parts = list(served.client.encode_stream_parts(TEXTS[2:3], attention=AttentionQuery(layers=[0])))
    layer = parts[-1]
    assert getattr(layer, "pattern", None) is not None
