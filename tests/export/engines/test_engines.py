"""Measurements of `check --engine openvino`, in OpenVINO and in engines with planted errors."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from attnlens.openvino import OpenvinoPrecision, multiplies_bf16
from attnlens.v1.manifest_pb2 import EngineCheck, GateKind, OutputRole, Precision
from attnlens_export import ExportOptions, export_bundle
from attnlens_export.engines import measure as engines
from attnlens_export.engines.measure import (
    Engine,
    EngineOptions,
    EngineSummary,
    find_engine,
    measure_engine,
    precision_name,
)
from attnlens_export.engines.texts import split_by_length
from attnlens_export.errors import EngineError
from attnlens_export.int8.texts import KINDS, Batch
from attnlens_export.parity.grid import Case, Inputs, small_grid
from attnlens_model import EncoderConfig
from attnlens_runtimes import NotInstalledError, PythonRuntime, Settings
from configs import small_config
from runtimes.measured import alter
from runtimes.stand_in import stand_in

pytestmark = pytest.mark.extended  # `tests/server/engine` has the engines of a server

SmallBundle = Callable[[str], Path]
CASES = [*small_grid(40)[::2]]


def measured(bundle: Path, *precisions: OpenvinoPrecision, cases: list[Case] | None = None) -> EngineSummary:
    options = EngineOptions(precisions, timeout_s=120)
    return measure_engine(bundle, find_engine(options), grid=cases or CASES)


def of_kind(check: EngineCheck, kind: GateKind.ValueType, role: OutputRole.ValueType) -> list[float]:
    return [gate.value for gate in check.gates if (gate.kind, gate.role) == (kind, role)]


class StandIn(PythonRuntime):
    """A runtime that misbehaves in bf16, and is right in fp32."""

    def __init__(self, behavior: str, claimed: str = "bf16") -> None:
        super().__init__("stand-in", (), lambda _path: None)  # type: ignore[arg-type,return-value]
        object.__setattr__(self, "behavior", behavior)
        object.__setattr__(self, "claimed", claimed)

    def command(self, settings: Settings | None = None) -> tuple[str, ...]:
        assert settings is not None
        if settings.properties["INFERENCE_PRECISION_HINT"] == "f32":
            return stand_in("works").command
        return stand_in(vars(self)["behavior"], vars(self)["claimed"]).command


def in_stand_in(bundle: Path, behavior: str, claimed: str = "bf16") -> EngineSummary:
    engine = Engine("1.0", EngineOptions(("fp32", "bf16"), timeout_s=60), StandIn(behavior, claimed))
    return measure_engine(bundle, engine, grid=CASES[-1:])


@pytest.fixture
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "multiplies_bf16", lambda: True)


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "multiplies_bf16", lambda: False)


def test_small_encoder_passes_in_fp32(small_bundle: SmallBundle) -> None:
    summary = measured(small_bundle("wordpiece"), "fp32")
    [result] = summary.results
    check = result.to_message()
    assert (result.failures(), summary.not_measured) == ([], ())
    assert check.passed
    assert (check.engine, check.device, check.precision) == ("openvino", "CPU", Precision.PRECISION_FP32)
    assert check.processor
    assert check.version.count(".") == 2
    assert check.num_cases == len(CASES)
    assert check.num_texts > 100
    of_texts = [gate for gate in check.gates if gate.text_kind]
    assert {gate.text_kind for gate in of_texts} == {*KINDS}
    assert all(gate.value > 0.999999 for gate in of_texts)
    hidden = OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE
    errors = of_kind(check, GateKind.GATE_KIND_MAX_ABS_ERROR, hidden)
    assert len(errors) == 2  # of two graphs
    assert all(0 < error <= 1e-5 for error in errors)
    [alone] = of_kind(check, GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, OutputRole.OUTPUT_ROLE_EMBEDDING)
    assert alone <= 1e-5
    [missed] = of_kind(
        check, GateKind.GATE_KIND_MAX_INCOMPLETENESS, OutputRole.OUTPUT_ROLE_TOKEN_CONTRIBUTIONS
    )
    assert 0 < missed <= 1e-5
    assert {(figure.graph, figure.role) for figure in check.figures} == {
        ("embeddings", hidden),
        ("attention", hidden),
        ("attention", OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS),
    }


def test_graph_that_is_wrong_fails(small_bundle: SmallBundle, tmp_path: Path) -> None:
    """The scores of the last layer are multiplied by 1.001 in the graph of attention alone."""
    altered = alter(small_bundle("wordpiece"), tmp_path / "altered")
    [result] = measured(altered, "fp32").results
    assert not result.passed
    assert result.failures()
    assert all(line.startswith("onnx/model_attentions.onnx: ") for line in result.failures())


def test_random_ids_are_used_without_a_tokenizer(
    tiny_config: EncoderConfig, quick: ExportOptions, output: Path
) -> None:
    export_bundle(tiny_config, output, quick)
    [result] = measured(output, "fp32").results
    assert result.passed
    assert result.check.num_texts == 0
    assert {gate.text_kind for gate in result.gates()} == {""}
    embedding = OutputRole.OUTPUT_ROLE_EMBEDDING
    [alone] = of_kind(result.to_message(), GateKind.GATE_KIND_MAX_BATCH_DIFFERENCE, embedding)
    assert alone <= 1e-5


@pytest.mark.usefixtures("with_bf16")
@pytest.mark.parametrize(
    ("behavior", "failure"),
    [
        ("is far off", "onnx/model.onnx: min cosine of last_hidden_state on 2x33 right is 0.99"),
        ("crashes", "onnx/model.onnx: stopped at 2x33 right: crashed: signal 11 (SIGSEGV)"),
        (
            "gives NaN for padding",
            "onnx/model.onnx: number of outputs with NaN or infinity on 2x33 right",
        ),
    ],
)
def test_error_in_bf16_fails_only_bf16(small_bundle: SmallBundle, behavior: str, failure: str) -> None:
    summary = in_stand_in(small_bundle("wordpiece"), behavior)
    exact, reduced = summary.results
    assert exact.failures() == []
    assert not reduced.passed
    assert any(line.startswith(failure) for line in reduced.failures()), reduced.failures()
    assert [line for line in summary.failures() if not line.startswith("openvino in bf16: ")] == []


@pytest.mark.usefixtures("with_bf16")
def test_engine_with_an_unexpected_precision_is_rejected(small_bundle: SmallBundle) -> None:
    _, reduced = in_stand_in(small_bundle("wordpiece"), "works", "fp32").results
    assert not reduced.passed
    line = "onnx/model.onnx: can't be opened: the engine computes in fp32 instead of bf16"
    assert reduced.failures()[0] == line


def test_engine_that_opens_nothing_is_an_error(small_bundle: SmallBundle) -> None:
    engine = find_engine(EngineOptions(("fp32",), device="TPU"))
    with pytest.raises(EngineError, match=r"onnx/model\.onnx can't be opened: .*TPU"):
        measure_engine(small_bundle("wordpiece"), engine, grid=CASES)


@pytest.mark.usefixtures("without_bf16")
def test_bf16_is_omitted_with_the_reason_unless_it_was_named(small_bundle: SmallBundle) -> None:
    bundle = small_bundle("wordpiece")
    chosen, missing = find_engine().choose(bundle)
    assert chosen == ["fp32"]
    assert {each.precision: each.reason for each in missing} == {
        "bf16": "this processor has no instructions for bf16 (avx512_bf16 or amx_bf16 in /proc/cpuinfo)",
        "int8": "the bundle has no graph in int8",
    }
    with pytest.raises(EngineError, match=r"bf16 can't be measured: this processor .*; choose another"):
        find_engine(EngineOptions(("bf16",))).choose(bundle)
    with pytest.raises(EngineError, match=r"int8 can't be measured: the bundle has no graph in int8"):
        find_engine(EngineOptions(("fp32", "int8"))).choose(bundle)


def test_missing_openvino_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnlens_runtimes.runtime._version_of", lambda _: None)
    with pytest.raises(NotInstalledError, match=r"not installed: pip install 'attnlens\[openvino\]'$"):
        find_engine()


def test_batches_are_split_and_padded_like_in_a_server() -> None:
    config = small_config()
    lengths = np.array([3, 15, 16, 31, 32, 33])
    mask = (np.arange(33) < lengths[:, None]).astype(np.int64)
    batch = Batch(Inputs(mask * 7, mask, None), (5, 4, 3, 2, 1, 0))
    parts = list(split_by_length(batch, config))
    assert [part.text_indices for part in parts] == [(5, 4, 3), (2, 1), (0,)]
    assert [part.inputs.input_ids.shape for part in parts] == [(3, 16), (2, 32), (1, 40)]
    assert [part.inputs.attention_mask.sum() for part in parts] == [34, 63, 33]
    assert [part.inputs.input_ids.sum() for part in parts] == [7 * 34, 7 * 63, 7 * 33]


def test_minilm_passes_in_every_lower_precision_that_is_there(minilm_bundle: Path) -> None:
    available, missing = find_engine().choose(minilm_bundle)
    assert ("bf16" in available) is (multiplies_bf16() is not False)
    assert ("int8" in available) is (minilm_bundle / "onnx" / "model_int8.onnx").is_file()
    lower = [precision for precision in available if precision != "fp32"]
    if not lower:
        pytest.skip("; ".join(f"{each.precision}: {each.reason}" for each in missing))
    summary = measured(minilm_bundle, *lower, cases=CASES[-1:])
    assert summary.failures() == []
    assert [precision_name(result.check.precision) for result in summary.results] == lower
    for result in summary.results:
        gates = [gate for gate in result.gates() if gate.text_kind]
        smallest = [gate.value for gate in gates if gate.kind == GateKind.GATE_KIND_MIN_COSINE]
        assert len(smallest) == len(KINDS)
        is_bf16 = result.check.precision == Precision.PRECISION_BF16
        assert (0.9998 if is_bf16 else 0.995) <= min(smallest) < 0.99999  # not fp32


def test_result_is_json_without_nan(small_bundle: SmallBundle) -> None:
    [result] = measured(small_bundle("wordpiece"), "fp32", cases=CASES[:1]).results
    first, *others = result.comparisons
    first = dataclasses.replace(first, value=float("nan"))
    content = dataclasses.replace(result, comparisons=(first, *others)).to_json()
    assert content["comparisons"][0]["value"] is None
    assert not content["comparisons"][0]["passed"]
    assert content["precision"] == "fp32"
