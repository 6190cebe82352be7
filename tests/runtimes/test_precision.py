"""Runtimes as people open them: in lower precision where that is the default, converted by their own tools.

With the real MiniLM: random weights hide what lower precision does to attention.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper
from tokenizers import Tokenizer

from attnlens_export.graph.names import ATTENTIONS_PATH, EMBEDDINGS_PATH
from attnlens_export.graph.read import read_structure
from attnlens_export.parity.grid import Case, Padding, small_grid
from attnlens_export.parity.reference import difference
from attnlens_export.parity.sessions import Graph
from attnlens_model.attention.parts.masks import MASKED_SCORE
from attnlens_runtimes import FP32, GraphProcess
from attnlens_runtimes.runtime import Feed
from runtimes.measured import found, measure_all
from runtimes.stand_in import stand_in

pytestmark = pytest.mark.extended  # other runtimes, and MiniLM converted by other tools

PASSAGES = Path(__file__).parents[1] / "data" / "passages.jsonl"
# Half of fp32's lowest number, which was the mask's until OpenVINO was run with its defaults.
FORMER_MASKED_SCORE = float(np.finfo(np.float32).min / 2)
GRAPHS = [EMBEDDINGS_PATH, ATTENTIONS_PATH]


def passages(bundle: Path, step: int) -> Iterator[Feed]:
    """Yield every `step`-th passage, in batches of 8, padded right and left in turns."""
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines][::step]
    for number, start in enumerate(range(0, len(texts), 8)):
        tokenizer.enable_padding(direction=("right", "left")[number % 2])
        encodings = tokenizer.encode_batch(texts[start : start + 8])
        ids = np.array([each.ids for each in encodings], dtype=np.int64)
        mask = np.array([each.attention_mask for each in encodings], dtype=np.int64)
        yield {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


@pytest.fixture(scope="module")
def former_bundle(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM with the former mask."""
    bundle = Path(shutil.copytree(minilm_bundle, tmp_path_factory.mktemp("former") / "minilm"))
    for path in GRAPHS:
        [mask] = [
            each
            for each in read_structure(bundle / path).graph.initializer
            if each.name.startswith("constant_") and (numpy_helper.to_array(each) == MASKED_SCORE).all()
        ]
        # The value follows the name. Its length must not change, because graphs share weights by offset.
        content = (bundle / path).read_bytes()
        name = content.index(b"B" + bytes([len(mask.name)]) + mask.name.encode())
        place = content.index(mask.raw_data, name)
        assert place - name < 24
        former = np.float32(FORMER_MASKED_SCORE).tobytes()
        (bundle / path).write_bytes(content[:place] + former + content[place + len(former) :])
    return bundle


@pytest.mark.parametrize("path", GRAPHS)
def test_mask_changes_no_bit_in_onnx_runtime(path: str, minilm_bundle: Path, former_bundle: Path) -> None:
    sessions = [
        onnxruntime.InferenceSession(bundle / path, providers=["CPUExecutionProvider"])
        for bundle in (minilm_bundle, former_bundle)
    ]
    for feed in passages(minilm_bundle, step=50):
        assert not feed["attention_mask"].all()
        now, before = (session.run(None, feed) for session in sessions)
        for tensor, former in zip(now, before, strict=True):
            assert np.array_equal(tensor, former)  # at padded positions too


@pytest.mark.parametrize("path", GRAPHS)
def test_openvino_with_defaults_matches_minilm(path: str, minilm_bundle: Path) -> None:
    """In bf16 where the CPU has it, on real prose."""
    cosines, errors = [], []
    exact = onnxruntime.InferenceSession(minilm_bundle / path, providers=["CPUExecutionProvider"])
    with GraphProcess(found("openvino"), minilm_bundle / path, timeout_s=120) as process:
        for feed in passages(minilm_bundle, step=40):
            hidden, *_ = process.run(feed)
            compared = difference(hidden, exact.run(None, feed)[0], feed["attention_mask"] == 1)
            cosines.append(compared.min_cosine)
            errors.append(compared.max_abs)
        print(f"{path} in {process.precision}: {min(cosines):.6f}")  # noqa: T201 - shown by `pytest -rP`
        assert process.precision in {"bf16", FP32}
        assert min(cosines) >= 0.999
        assert (max(errors) <= 1e-5) is (process.precision == FP32)


def test_check_tells_the_default_precision_from_fp32(minilm_bundle: Path, former_bundle: Path) -> None:
    """OpenVINO with the former mask fails in bf16, the default, and passes in fp32."""
    cases = [Case(1, 7, Padding.NONE), Case(3, 33, Padding.RIGHT)]
    now = measure_all(minilm_bundle, found("openvino"), cases)
    assert [result.failures() for result in now] == [[]] * len(now)
    assert now[-1].precision == FP32
    if len(now) == 1:
        pytest.skip("this CPU has no bfloat16")
    assert now[0].precision == "bf16"
    default, exact = measure_all(minilm_bundle, found("openvino"), cases, altered=former_bundle)
    assert exact.passed
    assert not default.passed
    expected = "openvino in bf16: onnx/model.onnx: min cosine of last_hidden_state on "
    assert default.failures()[0].startswith(expected)


def test_converter_of_onnx_runtime_to_fp16_keeps_minilm(minilm_bundle: Path) -> None:
    [result] = measure_all(minilm_bundle, found("onnxruntime-fp16"))
    assert result.failures() == []
    assert result.precision == "fp16"
    assert result.num_cases == 5
    cosines = [errors.min_cosine for errors in result.worst_errors()]
    assert len(cosines) == 3
    assert all(0.999 <= cosine < 1 - 1e-9 for cosine in cosines)  # not fp32


@pytest.mark.parametrize("path", GRAPHS)
def test_optimizer_of_onnx_runtime_changes_minilm_by_rounding_only(path: str, minilm_bundle: Path) -> None:
    graph = Graph(minilm_bundle, path)
    with GraphProcess(found("onnxruntime-bert"), minilm_bundle / path, timeout_s=120) as process:
        for feed in passages(minilm_bundle, step=60):
            outputs = graph._session.run(None, feed)
            live = feed["attention_mask"] == 1
            for tensor, exact in zip(process.run(feed), outputs, strict=True):
                assert difference(tensor, exact, live).max_abs <= 1e-5


@pytest.mark.parametrize(
    ("behavior", "failure"),
    [
        ("is far off", "min cosine of last_hidden_state on 2x33 right is 0.99"),
        ("gives NaN for padding", "number of outputs with NaN or infinity"),
        ("attends to padding", "attention weight of a masked token on 2x33 right is 0.0001 (limit 0)"),
    ],
)
def test_errors_not_caused_by_lower_precision_fail(tiny_bundle: Path, behavior: str, failure: str) -> None:
    default, exact = measure_all(tiny_bundle, stand_in(behavior, "bf16"))
    assert exact.failures() == []
    assert (default.precision, exact.precision) == ("bf16", FP32)
    assert not default.passed
    assert any(failure in line for line in default.failures())
    assert all(line.startswith("stand-in in bf16: ") for line in default.failures())


def test_runtime_that_stops_in_lower_precision_is_measured_in_fp32(tiny_bundle: Path) -> None:
    default, exact = measure_all(tiny_bundle, stand_in("crashes", "fp16"), small_grid(40))
    assert (default.precision, default.passed, default.num_cases) == ("fp16", False, 4)
    assert exact.passed
