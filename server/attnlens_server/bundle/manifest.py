"""From a manifest that was checked to what the server knows of its model."""

from attnlens.bundle import embedding_size, find_graph, max_dimensions
from attnlens.pooling import Pooling
from attnlens.v1 import manifest_pb2 as pb
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.bundle.model import Graph, Layout, Model, ModelOutputs, Output, OutputRole, RowSum
from attnlens_server.config import Precision

DATA_TYPES: dict[Precision, DataType.ValueType] = {
    "fp32": DataType.DATA_TYPE_FLOAT32,
    "fp16": DataType.DATA_TYPE_FLOAT16,
    "int8": DataType.DATA_TYPE_INT8,
}


def read_model(manifest: pb.Manifest, version: str, precision: Precision) -> Model:
    """Return the model, its embeddings computed in `precision`; attention is always computed in fp32."""
    sizes, pooling = manifest.architecture, manifest.pooling
    embeddings = find_graph(manifest, pb.GraphKind.GRAPH_KIND_EMBEDDINGS, DATA_TYPES[precision])
    attention = find_graph(manifest, pb.GraphKind.GRAPH_KIND_ATTENTIONS)
    graphs = {"embeddings": read_graph(embeddings, sizes), "attention": read_graph(attention, sizes)}
    return Model(
        name=manifest.model_name,
        version=version,
        max_tokens=manifest.max_tokens,
        max_positions=sizes.max_position_embeddings,
        hidden_size=sizes.hidden_size,
        num_layers=sizes.num_layers,
        vocab_size=sizes.vocab_size,
        type_vocab_size=0,
        pad_token_id=sizes.pad_token_id,
        takes_pairs=False,
        pooling=Pooling(pooling.pooling),
        normalize=pooling.normalize,
        exclude_prompt=pooling.exclude_prompt,
        max_dimensions=max_dimensions(manifest),
        embedding_size=embedding_size(manifest),
        prompts=dict(manifest.prompts),
        default_prompt_name=manifest.default_prompt_name,
        graphs=graphs,
        outputs=ModelOutputs(graphs["embeddings"], graphs["attention"]),
    )


def read_graph(graph: pb.Graph, sizes: pb.Architecture) -> Graph:
    """Return a graph as the server knows it."""
    outputs = []
    for value in graph.outputs:
        role, _, layer = value.name.partition(".")
        if role == "last_hidden_state":
            output = Output(
                value.name, OutputRole.LAST_HIDDEN_STATE, Layout.PER_TOKEN, width=sizes.hidden_size
            )
        else:
            output = Output(
                value.name,
                OutputRole.ATTENTION_WEIGHTS,
                Layout.DENSE,
                int(layer),
                sizes.num_heads,
                row_sum=RowSum.ONE,
            )
        outputs.append(output)
    return Graph(graph.path, tuple(value.name for value in graph.inputs), tuple(outputs))
