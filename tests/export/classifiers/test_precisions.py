"""Rerankers in int8: the trained reranker, its manifest and check, and exports that are refused."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from tokenizers import Tokenizer

from attnlens.bundle import read_manifest
from attnlens.v1.manifest_pb2 import GateKind, GraphPurpose, OutputRole, Precision
from attnlens_export import AccuracyError, ExportOptions, Int8, SourceError, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.fp16 import Fp16
from attnlens_export.int8 import precision
from attnlens_export.int8.result import Gate, LogitsGate
from attnlens_export.int8.texts import KINDS, read_kinds
from attnlens_export.parity.grid import small_grid
from small_files import sign
from trained_heads import TrainedHeads

GATE = LogitsGate(0.9, 0.3)  # With few texts, one pair of almost equal logits counts more than usual.
QUERY = "A man is playing a guitar."
DOCUMENTS = [
    "A man plays the guitar.",
    "A man plays.",
    "A man is eating.",
    "The stock market fell on Monday.",
]
RANKS, ERROR = GateKind.GATE_KIND_MIN_RANK_AGREEMENT, GateKind.GATE_KIND_MAX_LOGIT_ERROR


def export(source: Path, bundle: Path, precision: Int8 | Fp16) -> None:
    export_bundle(source, bundle, ExportOptions(grid=small_grid(4), precisions=[precision]))


@pytest.fixture(scope="module")
def reranker(trained_heads: TrainedHeads, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle with an int8 graph, calibrated with a quarter of the texts."""
    bundle = tmp_path_factory.mktemp("reranker") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "read_kinds", lambda _: {k: t[::4] for k, t in read_kinds(None).items()})
        export(trained_heads.reranker, bundle, Int8(GATE))
    return bundle


def logits(bundle: Path, name: str) -> np.ndarray:
    """Return the logits of `QUERY` and each of `DOCUMENTS`."""
    session = onnxruntime.InferenceSession(bundle / "onnx" / name)
    assert [output.name for output in session.get_outputs()] == ["logits"]
    encodings = Tokenizer.from_file(str(bundle / "tokenizer.json")).encode_batch(
        [(QUERY, document) for document in DOCUMENTS]
    )
    rows = [
        session.run(
            None,
            {
                "input_ids": np.array([encoding.ids]),
                "attention_mask": np.ones((1, len(encoding.ids)), np.int64),
                "token_type_ids": np.array([encoding.type_ids]),
            },
        )[0]
        for encoding in encodings
    ]
    return np.concatenate(rows)


def test_int8_logits_rank_documents_as_fp32_does(reranker: Path) -> None:
    fp32, int8 = logits(reranker, "model.onnx"), logits(reranker, "model_int8.onnx")
    assert list(int8.argsort(axis=0)) == list(fp32.argsort(axis=0))
    assert 0 < abs(int8 - fp32).max() < 0.3 * fp32.std()
    weights = onnx.load(reranker / "onnx" / "model_int8.onnx").graph.initializer
    types = {tensor.name: tensor.data_type for tensor in weights}
    assert types["dense.0.weight.T"] == types["dense.1.weight.T"] == onnx.TensorProto.FLOAT
    assert onnx.TensorProto.INT8 in types.values()


def test_manifest_states_the_gates_of_logits(reranker: Path) -> None:
    manifest = read_manifest(reranker)
    graph = manifest.graphs[-1]
    assert (graph.id, graph.path) == ("logits.int8", "onnx/model_int8.onnx")
    assert graph.purpose == GraphPurpose.GRAPH_PURPOSE_LOGITS
    assert graph.precision == Precision.PRECISION_INT8
    assert [output.role for output in graph.outputs] == [OutputRole.OUTPUT_ROLE_LOGITS]
    gates = [gate for gate in manifest.parity.gates if gate.graph == graph.id]
    limits = (RANKS, GATE.min_rank_agreement), (ERROR, GATE.max_logit_error)
    assert [(gate.text_kind, gate.kind, gate.limit) for gate in gates[:10]] == [
        (name, kind, limit) for name in KINDS for kind, limit in limits
    ]
    assert {gate.role for gate in gates[:11]} == {OutputRole.OUTPUT_ROLE_LOGITS}
    assert gates[10].kind == GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE
    made = graph.quantization
    assert made.num_texts > 200
    assert [kind.name for kind in made.text_kinds] == list(KINDS)
    assert (made.mean_cosine, made.text_kinds[0].mean_cosine) == (0, 0)


def test_check_measures_the_logits_again(reranker: Path) -> None:
    verdict = check_bundle(reranker, grid=small_grid(2)).verdict
    assert verdict.passed
    stated = [gate.value for gate in read_manifest(reranker).parity.gates if gate.kind == RANKS]
    found = verdict.precisions["int8"].comparisons
    assert [each.value for each in found if each.kind == RANKS] == stated


def test_check_detects_a_different_weight_in_int8(reranker: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(reranker, tmp_path / "copy"))
    path = copy / "onnx" / "model_int8.onnx"
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_int8"):
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.roll(values, 1, axis=0), tensor.name))
    path.write_bytes(model.SerializeToString())
    sign(copy)
    verdict = check_bundle(copy, grid=small_grid(2)).verdict
    assert not verdict.passed
    assert "onnx/model_int8.onnx: m" in verdict.failures()[0]
    assert " of logits on " in verdict.failures()[0]


def test_unreachable_gate_is_refused(
    trained_heads: TrainedHeads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "read_kinds", lambda _: {"sentences": read_kinds(None)["sentences"][::4]})
    refused = (
        r"no (graph|matrix product) in int8 .* rank agreement of 1 and .*export without --precision int8"
    )
    with pytest.raises(AccuracyError, match=refused):
        export(trained_heads.reranker, tmp_path / "bundle", Int8(LogitsGate(1.0, 1e-9)))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (Fp16(), "--precision fp16 is not supported for classifiers and rerankers: use int8"),
        (Int8(Gate(0.99, 0.9)), "--min-mean-cosine and --min-cosine limit the error of embeddings"),
    ],
)
def test_options_that_do_not_apply_to_logits_are_refused(
    trained_heads: TrainedHeads, tmp_path: Path, chosen: Int8 | Fp16, message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        export(trained_heads.reranker, tmp_path / "bundle", chosen)
