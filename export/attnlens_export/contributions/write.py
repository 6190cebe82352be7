"""Writing the graph of contributions into a bundle."""

from pathlib import Path

from attnlens.v1.manifest_pb2 import Dense, PoolingDefaults
from attnlens_export.contributions.graph import contributions_graph
from attnlens_export.contributions.tail import DenseWeights
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import CONTRIBUTIONS_PATH
from attnlens_export.graph.write import write_referring
from attnlens_export.precision import Fp32Graph
from attnlens_export.published.dense import read_weights


def write_contributions(source: Fp32Graph, checkpoint: Path | None, pooling: PoolingDefaults) -> str:
    """Write the graph beside that of the embeddings, whose weights it shares.

    Args:
        source: the graph of the embeddings.
        checkpoint: where the layers behind the pooling are; None: the bundle has no such layers.
        pooling: how the bundle embeds.

    Returns:
        Why the encoder has no such graph, as a sentence; empty: it was written.
    """
    dense = [] if checkpoint is None else [_read_layer(checkpoint, layer) for layer in pooling.dense]
    try:
        graph = contributions_graph(source.embeddings, source.config, dense)
    except GraphError as error:
        return str(error)
    write_referring(source.directory / CONTRIBUTIONS_PATH, graph.proto, graph.weights, source.places)
    return ""


def _read_layer(checkpoint: Path, layer: Dense) -> DenseWeights:
    weights = read_weights(checkpoint, layer)
    bias = weights.get("linear.bias")
    return DenseWeights(weights["linear.weight"], bias, layer.activation, layer.normalize_input)
