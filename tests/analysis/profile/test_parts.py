"""Assignment of graph nodes to parts, in exported graphs and after fusion by ONNX Runtime."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from attnlens_analysis.profile.parts import PARTS, parts_of
from attnlens_analysis.profile.trace import trace_runs
from attnlens_analysis.structure import Structure, read_proto, structure_of
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_model import load_checkpoint
from family_cases.rotary import MODERN_SIZES
from mixed_mechanisms import traced_mixed
from odd_models import OddModel

PRODUCTS = {"MatMul", "FusedMatMul", "Gemm"}


def optimized(graph: Path, directory: Path) -> Structure:
    """Return the structure of the graph after ONNX Runtime optimizations."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(directory / "optimized.onnx")
    onnxruntime.InferenceSession(
        str(graph),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["SkipLayerNormFusion"],  # as in the server
    )
    return structure_of(read_proto(directory / "optimized.onnx"))


@pytest.mark.parametrize("is_optimized", [False, True])
def test_nodes_of_minilm_are_assigned_to_parts(
    minilm_bundle: Path, tmp_path: Path, is_optimized: bool
) -> None:
    path = minilm_bundle / "onnx" / "model.onnx"
    structure = optimized(path, tmp_path) if is_optimized else structure_of(read_proto(path))
    parts = parts_of(structure)
    products = Counter(
        part for node, part in zip(structure.nodes, parts, strict=True) if node.operator in PRODUCTS
    )
    assert products == {"projections": 6 * 4, "feed-forward": 6 * 2, "scores": 6, "values": 6}
    counts = dict.fromkeys(PARTS, 0) | Counter(parts)
    assert counts["softmax"] == 6
    assert counts["norms"] == 13
    # Embeddings: one shape, three lookups and two sums. Each layer: two residual additions.
    assert counts["rest"] == 6 + 6 * 2
    assert set(parts) == set(PARTS)
    activation = next(node for node in structure.nodes if node.operator in {"Erf", "BiasGelu", "Gelu"})
    assert parts[structure.nodes.index(activation)] == "feed-forward"


@cache
def graphs(directory: Path) -> dict[str, TracedGraph]:
    """Return the embedding graphs of a model with mixed mechanisms and of a ModernBERT model."""
    OddModel("ModernBert", MODERN_SIZES | {"local_attention": 16}).make().save_pretrained(directory)
    modern = load_checkpoint(directory)
    return {
        "mixed": embeddings_graph(traced_mixed("pre")[1]),
        "modern": embeddings_graph(trace(modern.encoder, modern.config)),
    }


@pytest.mark.parametrize("name", ["mixed", "modern"])
def test_all_nodes_of_other_mechanisms_are_assigned_to_parts(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    graph = graphs(tmp_path_factory.getbasetemp())[name]
    path = tmp_path / "graph.onnx"
    write_embedded(path, graph.proto, graph.weights)
    structure = optimized(path, tmp_path)
    parts = parts_of(structure)
    assert set(parts) == set(PARTS)
    product_parts = {
        part for node, part in zip(structure.nodes, parts, strict=True) if node.operator in PRODUCTS
    }
    assert product_parts == {"projections", "feed-forward", "scores", "values"}
    ids = np.full((1, 24), 7, np.int64)
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    [[_, run]] = trace_runs(path, [feed], 1, 1, lambda _: None)
    assert {part for part, _ in run.node_us} == set(PARTS)
    assert len(run.node_us) == len(structure.nodes)
