"""The gate refuses encoders with mistakes that somebody could make in a mechanism.

The encoder with the mistake stands in for the graph that would be traced from it: a trace takes many seconds.
That a trace carries a mistake along is shown with those mechanisms of which it takes the fewest.
"""

import json
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import save_file

from attention_mistakes import ATTENTION, MISTAKES
from attention_mistakes.mistake import Mistake
from attnlens_export import ExportOptions, ParityError, export_bundle
from attnlens_export.contents import Verdict
from attnlens_export.graph.names import output_names
from attnlens_export.graph.trace import TracedGraph, trace
from attnlens_export.parity import measure as parity
from attnlens_export.parity.grid import Case, Inputs, default_grid, small_grid
from attnlens_export.parity.measure import ParityResult, Subject, measure_parity, worst
from attnlens_export.parity.reference import Tensors, run_fp32
from attnlens_model import Encoder, EncoderConfig, ModuleEncoder, new_encoder
from configs import changed, small_config

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


def tiny_grid(config: EncoderConfig) -> list[Case]:
    """Some cases of the grid of every bundle: a few short ones, and those for the edges of the mechanism."""
    small = small_grid(16)
    edges = {edge for attention in config.layer_attentions for edge in attention.edges}
    return [
        case
        for case in default_grid(config)
        if case in small or case.length in edges or case.length - 1 in edges
    ]


def judge(
    encoder: Encoder, mistake: Mistake | None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> ParityResult:
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
    subject = Subject(directory, encoder, encoder.config, "test", tiny_grid(encoder.config))
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
    found = worst(result.measurements)
    # Far more than rounding.
    assert found.max_abs_error > 1000 * found.allowed_error
    failed = {each.case for each in result.measurements if not each.passed}
    where = f"{found.worst_output} at {found.case}, {len(failed)} of {len(result.cases)} shapes fail"
    print(f"{kind}: {mistake}: {found.max_abs_error:.2f} in {where}")  # noqa: T201 - shown by -rP


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

    options = ExportOptions(pooling="mean", grid=tiny_grid(config), tracer=tracer)
    with pytest.raises(ParityError) as refusal:
        export_bundle(source, tmp_path / "bundle", options)
    assert not (tmp_path / "bundle").exists()
    # The same number is the worst one: nothing else than the mistake was found.
    case_and_place = expected.partition(" at ")[2].partition(" is ")[0]
    assert f" at {case_and_place} is " in str(refusal.value)
