"""The gate refuses encoders with mistakes that somebody could make in a mechanism.

The encoder with the mistake stands in for the graph that would be traced from it: a trace takes many seconds.
That a trace carries a mistake along is shown with those mechanisms of which it takes the fewest. Wrong nodes
and constants of a graph are found as well.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import save_file

from attention_mistakes import ATTENTION, MISTAKES
from attention_mistakes.mistake import Mistake
from attnlens.v1.manifest_pb2 import GateKind
from attnlens_export import ExportOptions, ParityError, export_bundle
from attnlens_export.contents import Verdict
from attnlens_export.graph.names import output_names
from attnlens_export.graph.trace import TracedGraph, trace
from attnlens_export.parity import measure as parity
from attnlens_export.parity.grid import Inputs, default_grid
from attnlens_export.parity.measure import (
    Subject,
    measure_grid,
    measure_parity,
    to_grid_graph,
    to_result,
)
from attnlens_export.parity.reference import Tensors, run_fp32
from attnlens_export.parity.sessions import Graph
from attnlens_export.parity.stored import References
from attnlens_export.progress import no_stage_progress
from attnlens_export.results import Result
from attnlens_model import Encoder, EncoderConfig, ModuleEncoder, new_encoder
from configs import changed, small_config
from graph_mutants import mutants

MADE = [pytest.param(kind, each, id=f"{kind}: {each}") for kind in MISTAKES for each in MISTAKES[kind]]
TRACED = {
    "overlapping": "heads shifted by a component",
    "mixture": "one head too few",
    "composed": "weights not composed by their keys",
}


def lively(config: EncoderConfig) -> Encoder:
    """A fresh encoder with every parameter moved away from its start: fresh kernels hardly do anything."""
    encoder = new_encoder(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return encoder


@pytest.fixture(scope="module")
def encoders() -> dict[str, Encoder]:
    """Two layers of each mechanism."""
    base = small_config({"family": "attnlens", "hidden_size": 24, "feed_forward.intermediate_size": 20})
    return {kind: lively(changed(base, {"attention": ATTENTION[kind]})) for kind in MISTAKES}


def judge(
    encoder: Encoder, mistake: Mistake | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Result:
    """Measure the encoder with the mistake, in place of a graph, against the encoder without it."""

    class WrongGraph:
        def __init__(self, _directory: Path, path: str) -> None:
            self.path = path

        def run(self, inputs: Inputs) -> Tensors:
            if mistake is None:
                return run_fp32(encoder, inputs, with_attentions=True)
            with mistake.made() as calls:
                outputs = run_fp32(encoder, inputs, with_attentions=True)
            assert calls
            return outputs

    structure = onnx.ModelProto()
    structure.graph.output.extend(onnx.ValueInfoProto(name=name) for name in output_names(encoder.config))
    (directory / "model.onnx").write_bytes(structure.SerializeToString())
    monkeypatch.setattr(parity, "Graph", WrongGraph)
    subject = Subject(directory, References(encoder), encoder.config, "test", default_grid(encoder.config))
    return measure_parity(subject, ["model.onnx"], lambda _detail, _done, _total: None)


@pytest.mark.parametrize("kind", MISTAKES)
def test_encoder_without_a_mistake_passes(
    kind: str, encoders: dict[str, Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = judge(encoders[kind], None, tmp_path, monkeypatch)
    assert result.failures() == []
    assert result.passed


@pytest.mark.parametrize(("kind", "mistake"), MADE)
def test_mistake_is_found(
    kind: str,
    mistake: Mistake,
    encoders: dict[str, Encoder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = judge(encoders[kind], mistake, tmp_path, monkeypatch)
    assert not Verdict(result).passed
    errors = [each for each in result.comparisons if each.kind == GateKind.GATE_KIND_MAX_ABS_ERROR]
    found = max(errors, key=lambda each: each.value)
    # Far more than rounding.
    assert found.value > 1000 * found.limit
    failed = {each.inputs for each in errors if not each.passed}
    print(f"{kind}: {mistake}: {found.failure}, {len(failed)} shapes fail")  # noqa: T201 - shown by -rP


@pytest.mark.parametrize(
    "kind",
    ["mixture", *(pytest.param(kind, marks=pytest.mark.extended) for kind in TRACED if kind != "mixture")],
)
def test_export_with_a_mistake_in_the_traced_encoder_is_rejected(
    kind: str, encoders: dict[str, Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [mistake] = [each for each in MISTAKES[kind] if str(each) == TRACED[kind]]
    config = changed(encoders[kind].config, {"num_layers": 1})
    encoder = lively(config)
    with monkeypatch.context() as patch:
        expected = judge(encoder, mistake, tmp_path, patch).failures()[0]
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config.to_hugging_face()), encoding="utf-8")
    save_file(encoder.state_dict(), source / "model.safetensors")

    def tracer(encoder: Encoder | ModuleEncoder, config: EncoderConfig) -> TracedGraph:
        with mistake.made() as calls:
            graph = trace(encoder, config)
        assert calls
        return graph

    options = ExportOptions(pooling="mean", grid=default_grid(config), tracer=tracer)
    with pytest.raises(ParityError) as refusal:
        export_bundle(source, tmp_path / "bundle", options)
    assert not (tmp_path / "bundle").exists()
    # The same number is the worst one: nothing else than the mistake was found.
    case, place = (part.partition(" is ")[0] for part in expected.partition(" on ")[2].split("): "))
    assert f" on {case} is " in str(refusal.value)
    assert f"): {place} is " in str(refusal.value)


ONE_LAYER = changed(
    small_config({"family": "attnlens", "hidden_size": 24, "num_layers": 1}),
    {"feed_forward.intermediate_size": 20, "positions.max_position_embeddings": 160},
)
MECHANISMS = {
    "softmax": {"kind": "softmax", "num_heads": 4},
    "longformer": ATTENTION["longformer"],
    "big_bird": ATTENTION["big_bird"][0] | {"table_tokens": 160},
}
# Few cases of the grid find them: those with an empty text, with padding on the left or in the middle, at the
# maximum length and at edges.
WRONG = {
    "softmax": ["drop Mul attentions.0"],
    "longformer": ["drop Mul mul_1", "last - 1 shared.0.positions", "drop Mul mul_21"],
    "big_bird": [
        "drop Add add_8",
        "last - 1 shared.0.masks.places",
        "- 1 shared.0.masks.last_of_start",
        "+ 1 constant_24",
    ],
}


def selected(graph: TracedGraph, names: Iterable[str]) -> dict[str, onnx.ModelProto]:
    """Return mutants by description."""
    found = dict(mutants(graph.proto_with_weights()))
    return {name: found[name] for name in names}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_mutants_of_graphs_are_found(mechanism: str, tmp_path: Path) -> None:
    config = changed(ONE_LAYER, {"attention": MECHANISMS[mechanism]})
    encoder = lively(config)
    traced = trace(encoder, config)
    models = {"unchanged": traced.proto_with_weights(), **selected(traced, WRONG[mechanism])}
    subject = Subject(tmp_path, References(encoder), config, "test", default_grid(config))
    graphs = {}
    for number, (name, model) in enumerate(models.items()):
        onnx.save(model, tmp_path / f"{number}.onnx")
        graphs[name] = to_grid_graph(Graph(tmp_path, f"{number}.onnx"), config, has_attention=True)
    grid = measure_grid(subject, graphs, no_stage_progress)
    assert [name for name in models if to_result(subject, grid, {name: ""}).passed] == ["unchanged"]
