"""The graphs of Longformer's attention, in both forms, at lengths other than the one that was traced."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

from attnlens.bundle import read_manifest
from attnlens_cli.commands.bundles.export import export
from attnlens_export import ExportOptions, SourceError, export_bundle
from attnlens_export.graph.lint import allowed_operators
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_model import Encoder, EncoderConfig, LongformerAttentionConfig, new_encoder, read_config
from configs import small_config
from odd_models import OddModel

FORMS = ["blocks", "dense"]
# On both sides of one block, of the windows, and of several blocks.
LENGTHS = [1, 2, 4, 5, 6, 10, 11, 31, 32, 33, 34, 63, 64, 65, 97, 110]


def longformer(window: int, num_global: int, form: str) -> dict[str, object]:
    return {
        "kind": "longformer",
        "num_heads": 4,
        "window": window,
        "num_global_tokens": num_global,
        "form": form,
    }


@cache
def traced(form: str) -> tuple[EncoderConfig, Encoder, TracedGraph]:
    """A window of two blocks with global tokens, and a window of one block without."""
    layers = [longformer(40, 3, form), longformer(5, 0, form)]
    config = small_config({"attention": layers, "positions.max_position_embeddings": 110})
    encoder = new_encoder(config, seed=0)
    return config, encoder, trace(encoder, config)


def open_graph(graph: TracedGraph, path: Path) -> onnxruntime.InferenceSession:
    write_embedded(path, graph.proto, graph.weights)
    onnx.checker.check_model(path, full_check=True)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("form", FORMS)
def test_both_graphs_matches_the_encoder_at_every_length(form: str, tmp_path: Path) -> None:
    config, encoder, graph = traced(form)
    attentions = open_graph(graph, tmp_path / "attentions.onnx")
    embeddings = open_graph(embeddings_graph(graph), tmp_path / "embeddings.onnx")
    shapes = [output.shape for output in attentions.get_outputs()[1:]]
    widths = [2 * 3 + 2 * 40 + 1, 2 * 5 + 1] if form == "blocks" else ["sequence_length"] * 2
    assert shapes == [["batch_size", 4, "sequence_length", width] for width in widths]
    for place, length in enumerate(LENGTHS):
        # Half of the paddings at each length, the others at the next.
        for padding in [*Padding][place % 2 :: 2] if length > 2 else [Padding.NONE]:
            inputs = make_inputs(Case(3, length, padding), config)
            found = attentions.run(None, inputs.feed())
            [hidden] = embeddings.run(None, inputs.feed())
            with torch.inference_mode():
                feed = {name: torch.from_numpy(array) for name, array in inputs.feed().items()}
                expected = encoder(**feed, output_attentions=True)
            live = inputs.attention_mask == 1
            wanted = expected.last_hidden_state.numpy()[live]
            np.testing.assert_allclose(found[0][live], wanted, rtol=0, atol=1e-5)
            np.testing.assert_allclose(hidden[live], wanted, rtol=0, atol=1e-5)
            for weights, tensor in zip(found[1:], expected.attentions, strict=True):
                np.testing.assert_allclose(weights, tensor.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_graph_has_the_operators_that_its_configuration_names(form: str) -> None:
    config, _, graph = traced(form)
    found = {node.op_type for node in graph.proto.graph.node}
    assert found <= allowed_operators(config)
    # Named for this mechanism and not for nothing.
    assert config.layer_attentions[0].operators <= found


@pytest.mark.parametrize("form", FORMS)
def test_graph_of_embeddings_computes_nothing_that_is_not_read(form: str) -> None:
    """ONNX Runtime does not remove such nodes, so it would convert weights to rows of a band in vain."""
    _, _, graph = traced(form)
    smaller = embeddings_graph(graph)
    nodes = smaller.proto.graph.node
    read = {name for node in nodes for name in node.input} | {"last_hidden_state"}
    assert all(read & set(node.output) for node in nodes)
    assert set(smaller.weights) <= read
    assert len(nodes) < len(graph.proto.graph.node)
    # No parameter is lost.
    assert {name for name in graph.weights if "." in name} == {
        name for name in smaller.weights if "." in name
    }


def test_no_constant_grows_with_the_square_of_the_longest_input() -> None:
    config, _, graph = traced("blocks")
    sizes = [
        array.size
        for name, array in graph.weights.items()
        if "layers." not in name and "embeddings." not in name
    ]
    assert max(sizes) < config.max_tokens * 2 * 40


def global_tokens(config: EncoderConfig) -> list[int]:
    """Of each layer of this mechanism."""
    layers = config.layer_attentions
    return [layer.num_global_tokens for layer in layers if isinstance(layer, LongformerAttentionConfig)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Longformer that is computed densely: such a bundle has rows of all tokens."""
    sizes = {"pad_token_id": 1, "type_vocab_size": 1, "attention_window": [12], "num_hidden_layers": 1}
    OddModel("Longformer", sizes).make().save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attnlens_form": "dense"}))
    return tmp_path / "source"


@pytest.mark.parametrize("number", [0, 3])
def test_number_of_global_tokens_is_chosen_at_export_and_stated(
    number: int, checkpoint: Path, tmp_path: Path
) -> None:
    arguments = [
        "--output",
        str(tmp_path / "bundle"),
        "--global-tokens",
        str(number),
        "--parity-tokens",
        "16",
        "--pooling",
        "mean",
    ]
    result = CliRunner().invoke(export, [str(checkpoint), *arguments])
    assert result.exit_code == 0, result.output
    bundle = tmp_path / "bundle"
    assert read_manifest(bundle).parity.passed
    content = json.loads((bundle / "config.json").read_text())
    assert content["attnlens_global_tokens"] == number
    assert content["attention_window"] == [12]
    config = read_config(bundle / "config.json")
    assert global_tokens(config) == [number]
    assert global_tokens(read_config(checkpoint / "config.json")) == [1]


def test_global_tokens_of_an_encoder_that_has_none_are_rejected(tmp_path: Path) -> None:
    message = r"--global-tokens 2 requires longformer attention, but this encoder uses softmax"
    with pytest.raises(SourceError, match=message):
        export_bundle(small_config(), tmp_path / "bundle", ExportOptions(global_tokens=2))
    assert not (tmp_path / "bundle").exists()
