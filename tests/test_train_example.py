"""examples/train_masked.py, from its command line to its output."""

import json
import sys
from pathlib import Path

import pytest

from attnlens_model import load_checkpoint
from examples.train_masked import main


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["train_masked.py", *args])
    main()


@pytest.mark.extended
def test_trained_model_is_saved_exported_served_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    attention = {"kind": "mixture", "shared_heads": 2, "active_heads": 1}
    run(monkeypatch, "--attention", json.dumps(attention), "--steps", "2", "--output", str(tmp_path))
    shown = capfd.readouterr().out
    commands = [line.split()[2] for line in shown.splitlines() if line.startswith("$ attnlens ")]
    assert commands == ["export", "serve", "attend", "attend"]
    header, *rows = (line.split() for line in shown.splitlines()[:6])
    assert header == ["plain", "mixture"]
    assert [row[0] for row in rows] == ["weights", "step", "step", "held-out", "seconds"]
    # The tokens of the sentence, in the first table and in the table of gates.
    assert shown.count(" river ") >= 2
    assert "Load: share of tokens that use the head." in shown
    config = load_checkpoint(tmp_path / "checkpoint").config
    assert config.family == "attnlens"
    assert attention.items() <= json.loads(config.to_json())["attention"].items()


def test_unsupported_configuration_is_rejected_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        SystemExit, match=r"^--attention: attention\.kind='mixtur' .* \(did you mean 'mixture'"
    ):
        run(monkeypatch, "--attention", "mixtur")
    with pytest.raises(SystemExit, match=r"^--attention: attention\.window=0: must be at least 1"):
        run(monkeypatch, "--attention", '{"kind": "longformer", "window": 0}')
    with pytest.raises(SystemExit):
        run(monkeypatch, "--steps", "0")
    assert "--steps 0: must be at least 1" in capsys.readouterr().err
