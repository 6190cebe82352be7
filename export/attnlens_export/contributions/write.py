"""Writes the contributions graph of a bundle."""

from pathlib import Path

from attnlens.v1.manifest_pb2 import Dense, Pooling, PoolingDefaults
from attnlens_export.contributions.graph import contributions_graph
from attnlens_export.contributions.tail import DenseWeights
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import CONTRIBUTIONS_PATH
from attnlens_export.graph.write import write_referring
from attnlens_export.precision import Fp32Graph
from attnlens_export.published.classifier import has_head
from attnlens_export.published.dense import NORM_WEIGHTS, read_weights

_ONE_TOKEN = (Pooling.POOLING_CLS, Pooling.POOLING_LAST_TOKEN)


def write_contributions(source: Fp32Graph, checkpoint: Path | None, pooling: PoolingDefaults) -> str:
    """Write the contributions graph next to the embeddings graph, with which it shares weights.

    Args:
        source: Embeddings graph.
        checkpoint: Directory of the dense layers, or None if the bundle has no dense layers.
        pooling: Pooling settings of the bundle.

    Returns:
        Empty string if the graph was written, otherwise the reason why it cannot be derived.
    """
    dense = [] if checkpoint is None else [read_layer(checkpoint, layer) for layer in pooling.dense]
    # Explanations of an embedding can ask for another pooling, those of a logit cannot.
    pools_one_token = has_head(source.directory) and pooling.pooling in _ONE_TOKEN
    try:
        graph = contributions_graph(source.embeddings, source.config, dense, pools_one_token=pools_one_token)
    except GraphError as error:
        return str(error)
    write_referring(source.directory / CONTRIBUTIONS_PATH, graph.proto, graph.weights, source.places)
    return ""


def read_layer(checkpoint: Path, layer: Dense) -> DenseWeights:
    """Return the weights of a dense layer of a checkpoint or bundle."""
    weights = read_weights(checkpoint, layer)
    bias = weights.get("linear.bias")
    norm = (weights[NORM_WEIGHTS[0]], weights[NORM_WEIGHTS[1]]) if layer.norm_epsilon else None
    return DenseWeights(
        weights["linear.weight"], bias, layer.activation, layer.normalize_input, norm, layer.norm_epsilon
    )
