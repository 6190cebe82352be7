"""Progress output when stderr is not a terminal."""

import pytest

from attnlens_cli.show.progress import shown_stages


def test_long_stage_states_its_remaining_time_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("attnlens_cli.show.progress.time.monotonic", lambda: now[0])
    with shown_stages(in_lines=True) as update:
        for step in range(10):
            update("Int8 sensitivity of each product", "", step, 10)
            now[0] += 3
        update("Hashing the files", "", 0, 1)
        update("Faithfulness", "contributions", 0, 30)
    assert capsys.readouterr().err.splitlines() == [
        "Int8 sensitivity of each product",
        "  2 of 10 steps done, about 24 s left in this stage",
        "Hashing the files",
        "Faithfulness: 30 steps",
    ]
