"""One bundle per family: graphs compared with `transformers`, and file contents."""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from attnlens.bundle import read_manifest
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.graph.names import CONTRIBUTIONS_PATH
from attnlens_export.graph.parameters import rebuild_encoder
from attnlens_export.parity.grid import Case, Padding, make_inputs, small_grid
from attnlens_export.parity.reference import run_float64, run_fp32
from attnlens_model import EncoderConfig, read_config
from attnlens_model.families import SUPPORTED_TYPES
from family_cases import EXPORTED, GROUPS
from odd_models import padded_masks, random_inputs
from runtimes.measured import extended_except, found, measure

# Operators of the BERT graph (docs/bundle.md), and those added by a family.
EXTRA_OPERATORS = {name: extra for group in GROUPS for name, extra in group.operators.items()}
# Their graphs have all operators between them.
RUN_ELSEWHERE = ("roberta", "deberta_v2", "t5", "nomic_bert", "gemma3_text", "nomic_bert with experts")
OPERATORS = {
    *("Add", "Cast", "Div", "Erf", "Gather", "LayerNormalization", "MatMul", "Mul", "Reshape", "Shape"),
    *("Slice", "Softmax", "Sub", "Tanh", "Transpose", "Unsqueeze"),
}


OURS = [name for name, odd in EXPORTED.items() if odd.config().model_type in SUPPORTED_TYPES]
# The others are exported by types_of_transformers.py.
TRACED = ["albert", "ernie", "eurobert", "mistral", "qwen3", "gemma3_text", "embedding_gemma2"]


class Exported:
    """A bundle and the model that it was made from."""

    def __init__(self, family: str, directory: Path) -> None:
        self.family, self.odd = family, EXPORTED[family]
        self.model: Any = self.odd.make()
        self.model.save_pretrained(directory / "source")
        self.bundle = directory / "bundle"
        longest = Case(2, self.odd.num_tokens, Padding.LEFT)
        options = ExportOptions(pooling="mean", grid=[*small_grid(self.odd.num_tokens), longest])
        self.summary = export_bundle(directory / "source", self.bundle, options)
        self.config = read_config(self.bundle / "config.json")

    def expected(self, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
        with torch.no_grad():
            output = self.model(**inputs, output_attentions=True)
        return [each.numpy() for each in (output.last_hidden_state, *output.attentions)]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    return functools.cache(lambda family: Exported(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(params=[*OURS, *TRACED])
def exported(request: pytest.FixtureRequest, export: Callable[[str], Exported]) -> Exported:
    return export(request.param)


def live_differences(found: list[np.ndarray], expected: list[np.ndarray], mask: np.ndarray) -> list[float]:
    live = mask == 1
    maps = [
        np.abs(a - b).transpose(0, 2, 1, 3)[live].max() for a, b in zip(found[1:], expected[1:], strict=True)
    ]
    return [float(np.abs(found[0] - expected[0])[live].max()), float(max(maps))]


@pytest.mark.parametrize("exported", OURS, indirect=True)
def test_float64_reference_matches_a_float64_copy(exported: Exported) -> None:
    """To the last bit: only where and when parameters are cast differs."""
    encoder = rebuild_encoder(exported.bundle / "onnx" / "model.onnx", exported.config)
    inputs = make_inputs(Case(3, 21, Padding.MIDDLE), exported.config)
    maps: list[np.ndarray] = []
    hidden = run_float64(encoder, inputs, lambda _layer, weights: maps.append(weights))
    exact, fp32 = copy.deepcopy(encoder).double(), run_fp32(encoder, inputs, with_attentions=True)
    with torch.no_grad():
        feed = {name: torch.from_numpy(array) for name, array in inputs.feed().items()}
        output = exact(**feed, output_attentions=True)
    expected = [each.numpy() for each in (output.last_hidden_state, *output.attentions)]
    assert len(maps) == exported.config.num_layers
    for tensor, wanted, single in zip([hidden, *maps], expected, fp32.values(), strict=True):
        assert np.array_equal(tensor, wanted)
        assert 0 < np.abs(tensor - single).max() < 1e-4


def test_graph_matches_transformers(exported: Exported) -> None:
    path = exported.bundle / "onnx" / "model_attentions.onnx"
    session = onnxruntime.InferenceSession(
        path, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )
    worst = [0.0, 0.0]
    for mask in padded_masks(4, exported.odd.num_tokens):
        inputs = random_inputs(exported.model.config, mask)
        found = session.run(None, {name: each.numpy() for name, each in inputs.items()})
        errors = live_differences(found, exported.expected(inputs), mask.numpy())
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    print(f"{exported.family}: hidden {worst[0]:.2e}, attention {worst[1]:.2e}")  # noqa: T201 - shown by `pytest -rP`
    assert max(worst) < 1e-5


def test_graph_runs_in_the_reference_implementation_of_onnx(exported: Exported) -> None:
    evaluator = ReferenceEvaluator(onnx.load(exported.bundle / "onnx" / "model_attentions.onnx"))
    for mask in list(padded_masks(2, 9))[:3]:
        inputs = random_inputs(exported.model.config, mask)
        found: Any = evaluator.run(None, {name: each.numpy() for name, each in inputs.items()})
        assert max(live_differences(found, exported.expected(inputs), mask.numpy())) < 1e-5


def test_families_that_run_elsewhere_have_all_operators() -> None:
    covered = set().union(*(EXTRA_OPERATORS.get(family, set()) for family in RUN_ELSEWHERE))
    assert covered == set().union(*(EXTRA_OPERATORS.get(family, set()) for family in OURS))


@pytest.mark.parametrize("name", extended_except(["opencv", "openvino", "tract"], "openvino"))
@pytest.mark.parametrize("exported", RUN_ELSEWHERE, indirect=True)
def test_graph_runs_in_other_runtimes(exported: Exported, name: str) -> None:
    cases = [Case(1, 1, Padding.NONE), Case(2, 33, Padding.RIGHT), Case(3, 7, Padding.EMPTY_ROW)]
    result = measure(exported.bundle, found(name), cases)
    # docs/runtimes.md: OpenCV has wrong contributions for many encoders.
    known = CONTRIBUTIONS_PATH if name == "opencv" else "-"
    assert [line for line in result.failures() if known not in line] == []
    assert result.num_cases == len(cases)


@pytest.mark.parametrize("exported", OURS, indirect=True)
def test_graph_has_the_operators_of_bert_and_few_more(exported: Exported) -> None:
    graph = onnx.load(exported.bundle / "onnx" / "model.onnx").graph
    extra = {node.op_type for node in graph.node} - OPERATORS
    assert extra == EXTRA_OPERATORS.get(exported.family, set())
    types = getattr(exported.model.config, "type_vocab_size", 0)
    names = [value.name for value in graph.input]
    assert names == ["input_ids", "attention_mask", *(["token_type_ids"] if types > 1 else [])]


def test_bundle_states_the_usable_length_and_passes_a_check(exported: Exported) -> None:
    manifest = read_manifest(exported.bundle)
    assert manifest.parity.passed
    # Families with several layouts are named with their distinguishing feature.
    name = exported.family.partition(" ")[0] if exported.family in OURS else exported.model.config.model_type
    assert manifest.architecture.family == name
    assert manifest.architecture.max_position_embeddings == exported.config.max_tokens
    assert manifest.max_tokens == exported.config.max_tokens
    # Rebuilt from the weights inside the graph: every parameter is there under its name.
    grid = [Case(2, exported.config.max_tokens, Padding.RIGHT)]
    assert check_bundle(exported.bundle, grid=grid).verdict.passed


@pytest.mark.parametrize("exported", OURS, indirect=True)
def test_config_json_has_the_common_names_and_is_read_as_the_same_model(exported: Exported) -> None:
    content = json.loads((exported.bundle / "config.json").read_text())
    config = exported.config
    assert content["hidden_size"] == config.hidden_size
    assert content["num_hidden_layers"] == config.num_layers
    assert content["num_attention_heads"] == config.num_heads
    assert content["intermediate_size"] == config.intermediate_size
    assert content["max_position_embeddings"] == config.positions.max_position_embeddings
    assert read_config(exported.bundle / "config.json") == config
    published = type(exported.model.config).from_pretrained(exported.bundle)
    assert EncoderConfig.from_dict(published.to_dict()) == config


@pytest.mark.parametrize("exported", OURS, indirect=True)
def test_fresh_encoder_of_each_family_has_a_config_that_others_read(exported: Exported) -> None:
    content = exported.config.to_hugging_face()
    theirs = type(exported.model.config)(**content)
    assert content["architectures"] == [f"{exported.odd.name}{exported.odd.kind}"]
    assert EncoderConfig.from_dict(theirs.to_dict()) == exported.config
