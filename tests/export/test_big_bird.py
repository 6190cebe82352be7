"""BigBird from a checkpoint to a bundle: graphs at lengths that were not traced, and the choice of blocks."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner, Result

from attnlens.bundle import read_manifest
from attnlens.pattern_messages import read_pattern
from attnlens.patterns import BlockTable
from attnlens_cli.commands.bundles.export import export
from attnlens_export import DifferenceError, ExportOptions, check_bundle, export_bundle
from attnlens_export.parity.grid import Case, Padding, make_inputs, small_grid
from attnlens_export.parity.long_context import one_head_config
from attnlens_model import Encoder, load_checkpoint, new_encoder, read_config
from odd_models import OddModel
from published_layouts import add_modules, save

# Up to 28 tokens attend fully. Traced at 9.
BIG_BIRD = OddModel("BigBird", {"block_size": 4, "num_random_blocks": 1})
LENGTHS = (1, 2, 4, 28, 29, 32, 33, 47, 64)


def run_export(*arguments: object) -> Result:
    return CliRunner().invoke(export, [str(each) for each in (*arguments, "--pooling", "mean")])


def draw(directory: Path, num_layers: int) -> Path:
    """Save the random checkpoint."""
    changes = BIG_BIRD.changes | {"num_hidden_layers": num_layers}
    dataclasses.replace(BIG_BIRD, changes=changes).make().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("source"), 2)


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundles") / "original"
    result = run_export(source, "--output", output)
    assert result.exit_code == 0, result.output
    return output


@pytest.fixture(scope="module")
def encoder(source: Path) -> Encoder:
    encoder = load_checkpoint(source).encoder
    assert isinstance(encoder, Encoder)
    return encoder


@pytest.mark.parametrize("name", ["model.onnx", "model_attentions.onnx"])
def test_graph_matches_the_encoder_at_every_length(bundle: Path, encoder: Encoder, name: str) -> None:
    session = onnxruntime.InferenceSession(bundle / "onnx" / name, providers=["CPUExecutionProvider"])
    for length in LENGTHS:
        for padding in Padding if length > 1 else [Padding.NONE]:
            inputs = make_inputs(Case(4, length, padding), encoder.config)
            with torch.inference_mode():
                feed = {key: torch.from_numpy(array) for key, array in inputs.feed().items()}
                output = encoder(**feed, output_attentions=True)
            hidden, *maps = session.run(None, inputs.feed())
            live = inputs.attention_mask == 1
            np.testing.assert_allclose(
                hidden[live], output.last_hidden_state.numpy()[live], rtol=0, atol=1e-5
            )
            assert len(maps) == (2 if name == "model_attentions.onnx" else 0)
            for rows, expected in zip(maps, output.attentions, strict=False):
                np.testing.assert_allclose(rows, expected.numpy(), rtol=0, atol=1e-5)


def test_short_texts_cost_at_most_two_blocks_of_two_tokens(bundle: Path) -> None:
    """Where no text can be long, the form for long texts has next to nothing to do."""
    model = onnx.load(bundle / "onnx" / "model.onnx")
    softmaxes = [node.output[0] for node in model.graph.node if node.op_type == "Softmax"]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in softmaxes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def sizes(length: int) -> list[tuple[int, ...]]:
        feed = {each.name: np.ones((1, length), dtype=np.int64) for each in session.get_inputs()}
        return [tensor.shape for tensor in session.run(None, feed)]

    # Of each layer: from the start to the start, from all blocks to some, from two blocks to all.
    assert sorted(sizes(28)[:3]) == sorted([(1, 3, 28, 28), (1, 3, 2, 2, 12), (1, 3, 4, 28)])
    assert sorted(sizes(29)[:3]) == sorted([(1, 3, 28, 28), (1, 3, 8, 4, 24), (1, 3, 8, 29)])


def test_bundle_has_the_original_blocks_unless_others_are_chosen(
    source: Path, bundle: Path, encoder: Encoder, tmp_path: Path
) -> None:
    # One layer: those of `transformers` are the first block in each.
    other, output = draw(tmp_path / "source", 1), tmp_path / "bundle"
    result = run_export(other, "--output", output, "--random-blocks", "transformers")
    assert result.exit_code == 0, result.output
    for directory, made_from, meaning in ((bundle, source, "original"), (output, other, "first_block")):
        # The longest input: for a shorter one, a probe of long texts would be traced too.
        longest = Case(1, read_manifest(directory).max_tokens, Padding.NONE)
        assert check_bundle(directory, made_from, grid=[longest]).verdict.passed
        content = json.loads((directory / "config.json").read_text())
        assert content["attnlens_random_blocks"] == meaning
        config = read_config(directory / "config.json")
        for layer, attention in enumerate(config.layer_attentions):
            [graph_output] = [
                each
                for each in read_manifest(directory).graphs[1].outputs
                if each.value.name == f"attentions.{layer}"
            ]
            found = read_pattern(graph_output)
            [expected] = [each.pattern for each in attention.outputs()]
            assert isinstance(found, BlockTable)
            assert isinstance(expected, BlockTable)
            np.testing.assert_array_equal(found.random_blocks, expected.random_blocks)
            assert (found.random_blocks.max() > 0) == (meaning == "original")
    assert read_config(bundle / "config.json") == encoder.config


def test_probe_of_long_texts_has_one_head_and_the_same_kind(encoder: Encoder) -> None:
    probe = one_head_config(encoder.config)
    assert probe is not None
    assert [type(each) for each in probe.layer_attentions] == [
        type(each) for each in encoder.config.layer_attentions
    ]
    assert probe.num_heads == 1
    ids = torch.full((1, 33), 7)
    with torch.inference_mode():
        output = new_encoder(probe, 0)(ids, torch.ones_like(ids))
    assert output.last_hidden_state.isfinite().all()


def test_random_blocks_option_is_rejected_for_other_mechanisms(tmp_path: Path) -> None:
    OddModel("Bert", {"num_hidden_layers": 1}).make().save_pretrained(tmp_path / "bert")
    choice = ("--output", tmp_path / "bundle", "--random-blocks", "original")
    (tmp_path / "my.json").write_text(read_config(tmp_path / "bert" / "config.json").to_json())
    for given in ([tmp_path / "bert"], ["--config", tmp_path / "my.json"]):
        result = run_export(*given, *choice)
        assert result.exit_code == 1
        assert "requires big_bird attention, but this encoder uses softmax" in result.stderr
    assert not (tmp_path / "bundle").exists()


def test_default_differs_from_the_pipeline_and_the_blocks_of_transformers_do_not(tmp_path: Path) -> None:
    """Texts of up to 32 tokens, of which those of more than 28 have random blocks."""
    one_layer = dataclasses.replace(BIG_BIRD, changes=BIG_BIRD.changes | {"num_hidden_layers": 1})
    source = tmp_path / "source"
    add_modules(source, save(one_layer, source, "wordpiece"), "mean")
    options = ExportOptions(grid=small_grid(33), faithfulness=False, comparison=True)
    remedy = r"hidden states on .*The pipeline has no random blocks: choose them with --random-blocks transf"
    with pytest.raises(DifferenceError, match=remedy):
        export_bundle(source, tmp_path / "bundle", options)
    options = dataclasses.replace(options, random_blocks="transformers")
    found = export_bundle(source, tmp_path / "bundle", options).manifest.publisher
    assert found.longest_tokens == 32
    assert "embeddings" in [figure.result for figure in found.figures]
