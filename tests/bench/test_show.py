"""Targets, tables and the chart, computed from synthetic rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from bench.contestants import ONE_BY_ONE, STRICT
from bench.setting import BASE
from bench.show.chart import draw_chart
from bench.show.report import report
from bench.show.scatter import spread_out
from bench.show.targets import Rows, as_json, targets
from bench_results import make_result, make_row

NEAR, INT8_COSINES, MISSED = (0.99998, 0.99997), (0.9992, 0.998), (0.9967, 0.74)
OPENVINO = "attnlens engine, OpenVINO"


def latency(p50: float) -> dict[str, float]:
    return {"p50": p50, "p95": 2 * p50, "p99": 3 * p50}


def make_rows() -> list[dict[str, Any]]:
    one: dict[str, Any] = {"what": ONE_BY_ONE, "workload": "sentences"}
    served: dict[str, Any] = {"clients": 64, "workload": "mixed", "latency_ms": latency(200.0)}
    return [
        make_row("ONNX Runtime MatMul", [20.0], cosines=None, what="matmul", workload="512x384x384"),
        make_row("attnlens engine", [10.0]),
        make_row(OPENVINO, [11.0]),
        make_row(OPENVINO, [18.0], "bf16", cosines=NEAR),
        make_row("attnlens engine", [22.0], "int8", cosines=INT8_COSINES),
        make_row(OPENVINO, [30.0], "int8", cosines=MISSED),
        make_row("attnlens engine", [16.0], STRICT, cosines=(0.99985, 0.999)),
        make_row("openvino-genai", [10.0]),
        make_row("openvino-genai", [15.0], "bf16", cosines=NEAR),
        make_row("openvino-genai", [25.0], "NNCF int8, bf16", cosines=MISSED, choice="2 x 8"),
        make_row("attnlens engine", [2.0], model=BASE),
        make_row("attnlens engine", [6.0], "int8", cosines=INT8_COSINES, model=BASE),
        make_row("attnlens engine", [10.0], workload="mixed"),
        make_row("attnlens server", [9.0], **served),
        make_row("attnlens server", [1.0], clients=1, workload="sentences", latency_ms=latency(3.0)),
        make_row("openvino-genai", [1.0], latency_ms=latency(2.5), **one),
        make_row("transformers eager", [4.0], cosines=None, what="attention", workload="short"),
        {**make_row("fastembed", [1.0]), "failure": "no such package"},
    ]


def target_values() -> dict[str, float | None]:
    extras = {"rss_mib": {"attnlens server fp32": 400.0, "attnlens server, OpenVINO bf16": 360.0}}
    return {target.what: target.value for target in targets(Rows(make_rows()), extras)}


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("fp32: best of our engines / openvino-genai fp32", 1.1),
        ("near-lossless: best of our engines / openvino-genai bf16", 1.2),
        ("near-lossless / our fp32 with ONNX Runtime", 1.8),
        ("int8 within the gate: best of our engines / NNCF's int8 in openvino-genai", 0.88),
        (f"{STRICT} / our fp32 with ONNX Runtime", 1.6),
        ("int8 within the gate / our fp32 with ONNX Runtime, BERT-base's sizes", 3.0),
        ("server with 64 clients / engine in-process, fp32", 0.9),
        ("one client, one short text, fp32: p50 over gRPC / openvino-genai in-process", 1.2),
        ("RSS of the server in bf16 with OpenVINO / in fp32 with ONNX Runtime", 0.9),
        ("server with 64 clients / engine in-process, bf16", None),
    ],
)
def test_target_uses_only_rows_within_its_tier(what: str, value: float | None) -> None:
    computed = target_values()[what]
    assert computed == (None if value is None else pytest.approx(value))


def test_report_sorts_rows_by_tier_and_marks_rows_that_miss_the_gate() -> None:
    computed = [as_json(target) for target in targets(Rows(make_rows()), {})]
    written = report(make_result(make_rows(), targets=computed))
    lines = [line for line in written.splitlines() if "MiniLM, passages" in line or " tokens/s" in line]
    assert lines[0] == "## MiniLM, passages: embeddings in-process"
    table = written.split(lines[0])[1].split("##")[0].strip().splitlines()[2:]
    programs = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in table]
    assert programs == [
        ("fp32", "attnlens engine, OpenVINO fp32", "11"),
        ("fp32", "attnlens engine fp32", "10"),
        ("fp32", "openvino-genai fp32", "10"),
        ("near-lossless", "attnlens engine, OpenVINO bf16", "18"),
        ("near-lossless", "openvino-genai bf16", "15"),
        ("int8 at 0.9998", f"attnlens engine {STRICT}", "16"),
        ("int8", "attnlens engine int8", "22"),
        ("misses the int8 gate", "attnlens engine, OpenVINO int8", "30"),
        ("misses the int8 gate", "openvino-genai NNCF int8, bf16", "25"),
    ]
    assert "0.996700    | 0.740000" in written
    assert "## One short text at a time" in written
    assert "Not measured: MiniLM: fastembed fp32: no such package" in written


def test_chart_is_drawn_with_all_rows_and_without_rows(tmp_path: Path) -> None:
    shapes = []
    for name, rows in (("all", make_rows()), ("none", [])):
        draw_chart(make_result(rows), tmp_path / f"{name}.png")
        picture = imread(tmp_path / f"{name}.png")
        shapes.append(picture.shape)
        colors = (picture[..., :3] * 255).astype(np.int64) @ [2**16, 2**8, 1]
        assert len(np.unique(colors)) > 50  # the image is not blank
    assert shapes[0] == shapes[1]


def test_spread_out_moves_only_overlapping_labels() -> None:
    assert spread_out([0.1, 0.5, 0.51, 0.9], 0.1) == pytest.approx([0.1, 0.455, 0.555, 0.9])
    crowded = spread_out([0.5] * 3 + [0.52], 0.1)
    assert np.diff(crowded) == pytest.approx([0.1] * 3)
    assert spread_out([], 0.1) == []
