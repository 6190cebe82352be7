"""Complete bundles: contents, and errors of the export."""

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tokenizers import Tokenizer

from attnlens.bundle import read_manifest, verify_files
from attnlens.v1.manifest_pb2 import GateKind, OutputLayout, OutputRole, Pooling, RowSum
from attnlens.v1.tensor_pb2 import DataType
from attnlens_export import (
    ExportOptions,
    GraphError,
    LintError,
    ParityError,
    SourceError,
    bundle,
    export_bundle,
)
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import Place, write_embedded
from attnlens_export.parity.grid import Case, Padding, small_grid
from attnlens_model import EncoderConfig
from attnlens_server.text import TextEncoder
from configs import changed


def test_minilm_bundle_is_complete(minilm_bundle: Path) -> None:
    manifest = read_manifest(minilm_bundle)
    verify_files(minilm_bundle, manifest)
    assert {file.path for file in manifest.files} == {
        "1_Pooling/config.json",
        "config.json",
        "config_sentence_transformers.json",
        "modules.json",
        "onnx/model.onnx",
        "onnx/model_attentions.onnx",
        "onnx/model_contributions.onnx",
        "parity/report.json",
        "parity/report.md",
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    }
    on_disk = {
        path.relative_to(minilm_bundle).as_posix() for path in minilm_bundle.rglob("*") if path.is_file()
    }
    assert on_disk == {file.path for file in manifest.files} | {"manifest.json"}


def test_minilm_manifest_contains_everything_a_server_needs(minilm_bundle: Path) -> None:
    manifest = read_manifest(minilm_bundle)
    assert manifest.source == "model"
    assert manifest.weights_license == "apache-2.0"
    assert manifest.max_tokens == 256
    assert manifest.pooling.pooling == Pooling.POOLING_MEAN
    assert manifest.pooling.normalize
    sizes = manifest.architecture
    assert (sizes.num_layers, sizes.num_heads, sizes.hidden_size, sizes.vocab_size) == (6, 12, 384, 30522)
    assert sizes.max_position_embeddings == 512
    assert set(manifest.tool_versions) == {"attnlens", "numpy", "onnx", "onnxruntime", "onnxscript", "torch"}
    embeddings, attentions, _ = manifest.graphs
    assert {(each.opset, each.ir_version) for each in manifest.graphs} == {(17, 8)}
    assert [value.name for value in embeddings.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
    assert {tuple(value.axes) for value in embeddings.inputs} == {("batch_size", "sequence_length")}
    assert {value.data_type for value in embeddings.inputs} == {DataType.DATA_TYPE_INT64}
    assert [output.value.name for output in embeddings.outputs] == ["last_hidden_state"]
    assert [output.value.name for output in attentions.outputs] == [
        "last_hidden_state",
        *(f"attentions.{layer}" for layer in range(6)),
    ]
    assert [graph.id for graph in manifest.graphs] == ["embeddings", "attention", "contributions"]
    files = [["onnx/model.onnx"], ["onnx/model.onnx"]]
    assert [list(graph.data_files) for graph in manifest.graphs] == [[], *files]
    hidden, *weights = attentions.outputs
    assert hidden == embeddings.outputs[0]
    assert (hidden.role, hidden.layout) == (
        OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
        OutputLayout.OUTPUT_LAYOUT_PER_TOKEN,
    )
    assert not hidden.HasField("layer")
    assert [output.layer for output in weights] == list(range(6))
    assert {(output.role, output.layout, output.num_heads, output.row_sum) for output in weights} == {
        (
            OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS,
            OutputLayout.OUTPUT_LAYOUT_DENSE,
            12,
            RowSum.ROW_SUM_ONE,
        )
    }
    layers = {
        (layer.attention, layer.num_heads, layer.head_size, layer.window_radius) for layer in sizes.layers
    }
    assert (len(sizes.layers), layers) == (6, {("softmax", 12, 32, 0)})
    assert (sizes.type_vocab_size, manifest.supports_text_pairs) == (2, True)
    assert list(attentions.outputs[1].value.axes) == [
        "batch_size",
        "12",
        "sequence_length",
        "sequence_length",
    ]


def test_minilm_manifest_describes_the_contributions_graph(minilm_bundle: Path) -> None:
    contributions = read_manifest(minilm_bundle).graphs[2]
    assert {value.name: list(value.axes)[1:] for value in contributions.inputs[3:]} == {
        "pooling_weights": ["sequence_length"],
        "takes_maximum": [],
        "direction": ["384"],
        "towards_itself": [],
        "num_dimensions": [],
        "head_gates": ["6", "12"],
    }
    layouts = [(output.role, output.layout) for output in contributions.outputs]
    assert layouts == [
        (OutputRole.OUTPUT_ROLE_EMBEDDING, OutputLayout.OUTPUT_LAYOUT_PER_TEXT),
        (OutputRole.OUTPUT_ROLE_TOKEN_CONTRIBUTIONS, OutputLayout.OUTPUT_LAYOUT_PER_TOKEN),
        (OutputRole.OUTPUT_ROLE_BASELINE, OutputLayout.OUTPUT_LAYOUT_PER_TEXT),
        (OutputRole.OUTPUT_ROLE_HEAD_CONTRIBUTIONS, OutputLayout.OUTPUT_LAYOUT_PER_TEXT),
    ]


def test_minilm_meets_the_documented_parity(minilm_bundle: Path) -> None:
    parity = read_manifest(minilm_bundle).parity
    assert parity.passed
    measured = [
        ("embeddings", OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE),
        ("attention", OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE),
        ("attention", OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS),
    ]
    assert [(figure.graph, figure.role) for figure in parity.figures] == measured
    *gates, embeddings, attention, contributions = parity.gates
    tokens, heads = OutputRole.OUTPUT_ROLE_TOKEN_CONTRIBUTIONS, OutputRole.OUTPUT_ROLE_HEAD_CONTRIBUTIONS
    explained = [
        ("contributions", role)
        for role in (tokens, tokens, tokens, heads, heads, OutputRole.OUTPUT_ROLE_EMBEDDING)
    ]
    twice = [each for each in measured for _ in range(2)]
    assert [(gate.graph, gate.role) for gate in gates] == twice + explained
    error, alone = GateKind.GATE_KIND_MAX_ABS_ERROR, GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE
    incompleteness = GateKind.GATE_KIND_MAX_INCOMPLETENESS
    kinds = [*3 * [error, alone], incompleteness, alone, error, error, incompleteness, error]
    assert [gate.kind for gate in gates] == kinds
    assert all(gate.value <= gate.limit for gate in gates)
    assert all(gate.limit >= 1e-5 for gate in gates)
    for repeated in (embeddings, attention, contributions):
        assert repeated.kind == GateKind.GATE_KIND_MAX_REPEAT_DIFFERENCE
        assert repeated.value == repeated.limit == 0
    for each in parity.figures:
        assert 0 < each.max_abs_error <= 1.5e-5
        assert 0 < each.torch_max_abs_error_float64 <= 1e-5
        assert each.min_cosine > 1 - 1e-8
    report = json.loads((minilm_bundle / "parity" / "report.json").read_text(encoding="utf-8"))
    assert report["passed"]
    figures = Counter(each["figure"] for each in report["parity"]["comparisons"])
    assert figures == {
        "max abs error of last_hidden_state": 2 * parity.num_cases,
        "max batch difference of last_hidden_state": 2 * parity.num_cases,
        "max abs error of attention_weights": parity.num_cases,
        "max batch difference of attention_weights": parity.num_cases,
        "number of outputs with NaN or infinity": 2 * parity.num_cases,
        "deviation of a row sum from 1": parity.num_cases,
        "attention weight of a masked token": parity.num_cases,
        "attention weight in a text without tokens": parity.num_cases,
    }
    for each in report["parity"]["comparisons"]:
        assert each["passed"]
        assert each["value"] <= each["limit"] < 1e-4
        assert ("weight" in each["figure"].partition(" of attention_")[0]) <= (each["limit"] == 0)
    for each in report["parity"]["errors"]:
        assert each["max_abs_error"] <= max(1e-5, 4 * each["torch_max_abs_error_float64"])
    page = (minilm_bundle / "parity" / "report.md").read_text(encoding="utf-8")
    assert page.startswith("# Parity of all-MiniLM-L6-v2: passed")


def test_minilm_graphs_share_aligned_weights(minilm_bundle: Path) -> None:
    directory = minilm_bundle / "onnx"
    assert (directory / "model_attentions.onnx").stat().st_size < 50_000
    whole = {tensor.name: tensor for tensor in onnx.load(directory / "model.onnx").graph.initializer}
    content = (directory / "model.onnx").read_bytes()
    structure = onnx.load(directory / "model_attentions.onnx", load_external_data=False)
    shared = 0
    for tensor in structure.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            assert len(tensor.raw_data) < 1024
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(place["offset"]), int(place["length"])
        assert place["location"] == "model.onnx"
        assert offset % 64 == 0
        assert content[offset : offset + length] == whole[tensor.name].raw_data
        shared += length
    assert shared > 0.99 * len(content)


@pytest.mark.parametrize("name", ["model.onnx", "model_attentions.onnx"])
def test_plain_onnxruntime_runs_a_minilm_graph(name: str, minilm_bundle: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_bundle / "tokenizer.json"))
    encoding = tokenizer.encode("A bundle is a directory.")
    feed = {
        "input_ids": np.array([encoding.ids]),
        "attention_mask": np.array([encoding.attention_mask]),
        "token_type_ids": np.array([encoding.type_ids]),
    }
    session = onnxruntime.InferenceSession(minilm_bundle / "onnx" / name, providers=["CPUExecutionProvider"])
    hidden, *attentions = session.run(None, feed)
    assert hidden.shape == (1, len(encoding.ids), 384)
    assert len(attentions) == (6 if "attentions" in name else 0)
    for each in (minilm_bundle / "onnx").iterdir():  # the checker refuses hard links, which other tests make
        (tmp_path / each.name).write_bytes(each.read_bytes())
    onnx.checker.check_model(tmp_path / name)


def test_documented_ten_lines_produce_a_servable_bundle(minilm_bundle: Path) -> None:
    """With a text over the limit, which they must cut where the server does."""
    page = (Path(__file__).parents[2] / "docs" / "bundle.md").read_text(encoding="utf-8")
    [code] = [
        block.partition("```")[0]
        for block in page.split("```python\n")
        if "A bundle is a directory." in block
    ]
    texts = ["word " * 300, "A short one."]
    code = code.replace("bundles/minilm", str(minilm_bundle))
    code = code.replace('["A bundle is a directory.", "It opens anywhere."]', repr(texts))
    names: dict[str, Any] = {}
    exec(code, names)
    taken = TextEncoder(minilm_bundle / "tokenizer.json", read_manifest(minilm_bundle).max_tokens)
    for row, encoded in enumerate(taken.encode([(text,) for text in texts])):
        live = names["feed"]["attention_mask"][row] == 1
        assert names["feed"]["input_ids"][row][live].tolist() == encoded.input_ids.tolist()
    assert names["hidden"].shape == (2, 256, 384)


def test_fresh_encoder_is_exported_reproducibly(
    quick: ExportOptions, tiny_config: EncoderConfig, tmp_path: Path
) -> None:
    hashes = []
    for name in ("first", "second"):
        summary = export_bundle(tiny_config, tmp_path / name, quick)
        assert summary.manifest.source == "config+seed:0"
        assert summary.manifest.model_name == "bert-2x48"
        hashes.append({file.path: file.sha256 for file in summary.manifest.files})
    assert "tokenizer.json" not in hashes[0]
    assert hashes[0] == hashes[1]


def test_weights_depend_on_the_seed_and_not_on_the_trace(
    quick: ExportOptions, tiny_config: EncoderConfig, tmp_path: Path
) -> None:
    """The whole way, tracing included, twice with one seed and once with another."""
    config = changed(tiny_config, {"num_layers": 1})
    digests = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        export_bundle(config, tmp_path / name, dataclasses.replace(quick, seed=seed, tracer=None))
        digests.append(hashlib.sha256((tmp_path / name / "onnx" / "model.onnx").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_weights_over_the_limit_go_to_a_file_of_their_own(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    summary = export_bundle(tiny_config, output, dataclasses.replace(quick, max_embedded_bytes=10_000))
    assert summary.manifest.parity.passed
    assert {file.path for file in summary.manifest.files} >= {"onnx/model.onnx", "onnx/model.onnx_data"}
    data_size = (output / "onnx" / "model.onnx_data").stat().st_size
    for name in ("model.onnx", "model_attentions.onnx"):
        path = output / "onnx" / name
        assert path.stat().st_size < data_size / 5
        onnx.checker.check_model(path)
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        locations = {
            entry.value
            for tensor in onnx.load(path, load_external_data=False).graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        assert locations == {"model.onnx_data"}
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert config["transformers.js_config"] == {"use_external_data_format": True}


def test_wrong_weight_fails_parity_by_name_and_leaves_nothing(
    broken: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    with pytest.raises(ParityError) as caught:
        export_bundle(tiny_config, output, broken)
    message = str(caught.value)
    assert "onnx/model" in message
    assert any(f" on {case} is " in message for case in small_grid(40))
    assert "attentions.1[" in message or "last_hidden_state[" in message
    assert "PyTorch returns" in message
    assert list(output.parent.iterdir()) == []


def test_failed_bundle_can_be_kept_and_is_marked(
    broken: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    summary = export_bundle(tiny_config, output, dataclasses.replace(broken, keep_failed=True))
    assert not summary.verdict.passed
    manifest = read_manifest(output)
    assert not manifest.parity.passed
    verify_files(output, manifest)
    assert "FAILED" in (output / "parity" / "report.md").read_text(encoding="utf-8").splitlines()[0]
    assert [path.name for path in output.parent.iterdir()] == ["tiny"]


def test_graph_that_is_not_portable_ends_the_export(
    quick: ExportOptions, tiny_config: EncoderConfig, tiny_trace: TracedGraph, output: Path
) -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(tiny_trace.proto)
    last = proto.graph.node[-1]
    dropout = onnx.helper.make_node("Dropout", ["before"], list(last.output), name="dropout_0")
    last.output[:] = ["before"]
    proto.graph.node.append(dropout)
    traced = TracedGraph(proto, tiny_trace.weights)
    with pytest.raises(LintError, match="Dropout is not allowed"):
        export_bundle(tiny_config, output, dataclasses.replace(quick, tracer=lambda *_: traced))
    assert list(output.parent.iterdir()) == []


def test_graph_that_is_not_onnx_ends_the_export(
    quick: ExportOptions, tiny_config: EncoderConfig, tiny_trace: TracedGraph, output: Path
) -> None:
    """A node in the wrong place, which the lint does not look at."""
    proto = onnx.ModelProto()
    proto.CopyFrom(tiny_trace.proto)
    first = onnx.NodeProto()
    first.CopyFrom(proto.graph.node[0])
    del proto.graph.node[0]
    proto.graph.node.append(first)
    traced = TracedGraph(proto, tiny_trace.weights)
    with pytest.raises(GraphError, match="is not valid ONNX"):
        export_bundle(tiny_config, output, dataclasses.replace(quick, tracer=lambda *_: traced))


def test_weights_are_read_back_after_writing(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a row of the token table that no input of the grid reads."""

    def write_wrongly(path: Path, proto: onnx.ModelProto, weights: dict[str, np.ndarray]) -> dict[str, Place]:
        places = write_embedded(path, proto, weights)
        place = places["embeddings.token.weight"]
        content = bytearray(path.read_bytes())
        content[place.offset + place.length - 1] ^= 1
        path.write_bytes(content)
        return places

    monkeypatch.setattr(bundle, "write_embedded", write_wrongly)
    options = dataclasses.replace(quick, grid=[Case(1, 1, Padding.NONE)])
    with pytest.raises(GraphError, match=r"the bytes of embeddings\.token\.weight differ"):
        export_bundle(tiny_config, output, options)


def test_pooling_options_end_up_in_the_manifest(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path
) -> None:
    options = dataclasses.replace(quick, pooling="cls", normalize=True)
    pooling = export_bundle(tiny_config, output, options).manifest.pooling
    assert pooling.pooling == Pooling.POOLING_CLS
    assert pooling.normalize


def test_tokenizer_of_another_model_ends_the_export(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path, minilm_dir: Path
) -> None:
    options = dataclasses.replace(quick, tokenizer=minilm_dir / "tokenizer.json")
    with pytest.raises(SourceError, match="belongs to another model"):
        export_bundle(tiny_config, output, options)
    assert list(output.parent.iterdir()) == []


def test_warning_of_a_bundle_without_contributions_is_for_users(
    quick: ExportOptions, tiny_config: EncoderConfig, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "write_contributions", lambda *_: "no contributions: Add 'add_3' adds 'x'")
    [warning] = export_bundle(tiny_config, output, quick).warnings
    assert warning.startswith("this bundle does not support contributions, the default method of")
    assert "(attention: softmax). Use another method, such as --method leave_one_out" in warning
    assert "developer of the encoder: Add 'add_3' adds 'x'; see docs/bundle.md" in warning
