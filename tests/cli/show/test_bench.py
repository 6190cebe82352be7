"""Output of `attnlens bench` for synthetic measurements: tables and commands to copy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from attnlens_cli.show.bench import ServeCommand, serve_commands, show_report
from attnlens_server.config import ServerConfig
from attnlens_server.tuning import Comparison, Report, Setting, Variant, VariantResult, Workload
from attnlens_server.tuning.settings import SettingResult
from attnlens_server.tuning.variants import Accuracy, Turn

REFERENCE, OV_BF16 = Variant("onnxruntime", "fp32"), Variant("openvino", "bf16")
TEXTS = Workload("2 made-up texts", (np.ones(10, dtype=np.int64), np.ones(30, dtype=np.int64)))
BEST = SettingResult(Setting(2, 2, 512), (900.0, 1000.0, 1100.0))
INT8_REASON = "my bundle has no graph in int8: export it again with --precision int8"


def _result(
    variant: Variant, rate: float, accuracy: Accuracy, device: str = "CPU", *, is_checked: bool = True
) -> VariantResult:
    return VariantResult(variant, (Turn(device, rate, 2.5),) * 3, accuracy, 300 << 20, is_checked)


def _report(rows: Sequence[VariantResult], chosen: Variant = REFERENCE, sample: Workload = TEXTS) -> Report:
    skipped = {Variant(engine, "int8"): INT8_REASON for engine in ("onnxruntime", "openvino")}
    comparison = Comparison(sample, 16, tuple(rows), skipped) if rows else None
    return Report(comparison, chosen, "CPU", 256, (BEST,), BEST)


ROWS = (
    _result(REFERENCE, 1000.0, Accuracy(1.0, 1.0)),
    _result(OV_BF16, 1750.0, Accuracy(0.99998, 0.99991), is_checked=False),
)


def _lines(commands: Sequence[ServeCommand]) -> list[tuple[str | None, str, str | None]]:
    return [
        (
            each.recommendation.tier.name if each.recommendation and each.recommendation.tier else None,
            each.command,
            each.check,
        )
        for each in commands
    ]


def test_command_of_the_chosen_engine_has_the_best_settings() -> None:
    config = ServerConfig(bundle=Path("my bundle"))
    check = "attnlens check 'my bundle' --engine openvino"
    found = "--threads 2 --lanes 2 --max-batch-tokens 512"
    bf16 = "attnlens serve 'my bundle' --engine openvino --precision bf16"
    assert _lines(serve_commands(config, _report(ROWS))) == [
        ("exact", f"attnlens serve 'my bundle' {found}", None),
        ("near-lossless", bf16, check),
    ]
    asked = ServerConfig(bundle=Path("my bundle"), engine="openvino", precision="bf16")
    assert _lines(serve_commands(asked, _report(ROWS, OV_BF16))) == [
        ("exact", "attnlens serve 'my bundle'", None),
        ("near-lossless", f"{bf16} {found}", check),
    ]
    assert _lines(serve_commands(config, _report(()))) == [
        (None, f"attnlens serve 'my bundle' {found}", None)
    ]


def test_command_names_a_device_other_than_the_default() -> None:
    on_cuda = (_result(REFERENCE, 1000.0, Accuracy(1.0, 1.0), "CUDA"), ROWS[1])
    config = ServerConfig(bundle=Path("b"), engine="openvino", precision="bf16", device="GPU.1", threads=3)
    [exact, bf16] = serve_commands(config, _report(on_cuda, OV_BF16))
    assert exact.command == "attnlens serve b --provider cuda --threads 3"
    assert bf16.command.startswith(
        "attnlens serve b --engine openvino --device GPU.1 --precision bf16 --threads 2"
    )


def test_speed_and_accuracy_are_shown_with_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report = _report(ROWS)
    show_report(report, TEXTS, "toy", serve_commands(ServerConfig(bundle=Path("b")), report))
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["onnxruntime", "fp32", "1,000", "1.00", "1.00000", "1.00000", "2.5", "300"] in lines
    assert ["openvino", "bf16", "1,750", "1.75", "0.99998", "0.99991", "2.5", "300"] in lines
    words = " ".join(shown.split())
    assert "and those of onnxruntime fp32, 2 made-up texts. alone: one text of 16 tokens." in words
    assert f"Not measured: onnxruntime int8, openvino int8: {INT8_REASON}" in words
    assert "exact: onnxruntime fp32 attnlens serve b --threads 2" in words
    assert (
        "near-lossless: openvino bf16, 1.75 times as fast, mean cosine 0.99998, smallest 0.99991, "
        "default settings attnlens check b --engine openvino # once: the bundle lacks a check of this engine "
        "attnlens serve b --engine openvino --precision bf16"
    ) in words
    assert "random ids" not in words
    assert max(len(line) for line in shown.splitlines()[1:] if "# once" not in line) <= 80


def test_cosines_of_random_ids_are_qualified(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = Workload("random texts", TEXTS.input_ids, are_real=False)
    show_report(_report(ROWS, sample=drawn), drawn, "toy", [])
    assert "Cosines of random ids do not apply to real texts" in " ".join(capsys.readouterr().out.split())
