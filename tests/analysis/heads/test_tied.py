"""Graphs in which queries are projected like keys."""

from collections import Counter
from pathlib import Path

import onnx

from attnlens_analysis.heads.tied import tied_graph
from attnlens_export.graph.trace import trace
from attnlens_export.graph.write import write_embedded
from attnlens_model.published_encoder import wrap_published
from odd_models import OddModel


def test_projections_of_a_traced_module_are_found_by_their_names(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "dim": 96, "hidden_dim": 160}
    encoder = wrap_published(OddModel("DistilBert", sizes).make(), "distilbert")
    graph = trace(encoder, encoder.config)
    write_embedded(tmp_path / "graph.onnx", graph.proto, graph.weights)
    tied = tied_graph(tmp_path / "graph.onnx", 1)
    assert tied is not None
    nodes = onnx.load_from_string(tied).graph.node
    counts = Counter(name for node in nodes for name in node.input if "_lin.weight" in name)
    names = [
        f"module.model.transformer.layer.{layer}.attention.{role}_lin.weight.T"
        for layer, role in ((0, "q"), (0, "k"), (1, "q"), (1, "k"))
    ]
    assert [counts[name] for name in names] == [1, 1, 0, 2]
