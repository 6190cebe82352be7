"""Measured programs run in processes that may fail: the report says why, and the others continue."""

import sys
from pathlib import Path

import pytest

from bench.cases import Case, RowKey, Sample, interleave
from bench.lines import LineProcess, ProcessError

DOUBLING = """
from bench.lines import answer_lines
print("what an import prints")
def handle(number):
    print("what a library prints")
    return {"doubled": 2 * number, "inverse": 1 / number}
answer_lines(handle, versions={"doubling": "1"})
"""


def python(script: str, directory: Path) -> LineProcess:
    return LineProcess([sys.executable, "-c", script], {}, directory / "logs" / "process.log")


def test_a_process_answers_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    with python(DOUBLING, tmp_path) as process:
        assert process.hello == {"versions": {"doubling": "1"}}
        assert process.ask(number=4) == {"doubled": 8, "inverse": 0.25}
        with pytest.raises(ProcessError, match="ZeroDivisionError: division by zero"):
            process.ask(number=0)
        assert process.ask(number=2) == {"doubled": 4, "inverse": 0.5}


def test_what_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ProcessError, match="No module named 'not_there'"),
        python("import not_there", tmp_path),
    ):
        pass


class Flaky(Case):
    """Fails at its second measurement."""

    def measure(self) -> Sample:
        if self.samples:
            raise ProcessError("out of breath")
        return Sample(2.0, 10, 100, 4e9)


class Steady(Case):
    """Always takes two seconds."""

    def measure(self) -> Sample:
        return Sample(2.0, 10, 100, 4e9)


def test_a_case_that_fails_is_a_row_that_says_why_and_the_others_are_measured() -> None:
    flaky = Flaky(RowKey("flaky", "fp32", "embed", "passages"))
    steady = Steady(RowKey("steady", "fp32", "embed", "passages", 64))
    interleave([flaky, steady], repetitions=3)
    failed, row = flaky.row(), steady.row()
    assert failed["failure"] == "out of breath"
    assert "tokens_per_s" not in failed
    assert row["tokens_per_s"] == {"median": 50, "min": 50, "max": 50, "all": [50, 50, 50]}
    assert row["gflop_per_s"]["median"] == 2
    assert str(steady.key) == "MiniLM: steady fp32: embed, passages, 64 clients"
