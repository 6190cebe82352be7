"""JSON-lines processes: failures are reported, and the remaining cases continue."""

import sys
from pathlib import Path

import pytest

from bench.cases import Case, RowKey, Sample, interleave
from bench.lines import LineProcess, ProcessError

DOUBLING = """
from bench.lines import serve_lines
print("output during import")
def handle(number):
    print("output of a library")
    return {"doubled": 2 * number, "inverse": 1 / number}
serve_lines(handle, versions={"doubling": "1"})
"""


def python(script: str, directory: Path) -> LineProcess:
    return LineProcess([sys.executable, "-c", script], {}, directory / "logs" / "process.log")


def test_process_continues_after_a_failed_request(tmp_path: Path) -> None:
    with python(DOUBLING, tmp_path) as process:
        assert process.hello == {"versions": {"doubling": "1"}}
        assert process.request(number=4) == {"doubled": 8, "inverse": 0.25}
        with pytest.raises(ProcessError, match="ZeroDivisionError: division by zero"):
            process.request(number=0)
        assert process.request(number=2) == {"doubled": 4, "inverse": 0.5}


def test_start_failure_includes_the_last_log_line(tmp_path: Path) -> None:
    with (
        pytest.raises(ProcessError, match="No module named 'not_there'"),
        python("import not_there", tmp_path),
    ):
        pass


class Flaky(Case):
    """A case whose second measurement fails."""

    def measure(self) -> Sample:
        if self.samples:
            raise ProcessError("process crashed")
        return Sample(2.0, 10, 100, 4e9)


class Steady(Case):
    """A case that always takes two seconds."""

    def measure(self) -> Sample:
        return Sample(2.0, 10, 100, 4e9)


def test_interleave_reports_a_failed_case_and_measures_the_others() -> None:
    flaky = Flaky(RowKey("flaky", "fp32", "embed", "passages"))
    steady = Steady(RowKey("steady", "fp32", "embed", "passages", 64))
    interleave([flaky, steady], repetitions=3)
    failed, row = flaky.row(), steady.row()
    assert failed["failure"] == "process crashed"
    assert "tokens_per_s" not in failed
    assert row["tokens_per_s"] == {"median": 50, "min": 50, "max": 50, "all": [50, 50, 50]}
    assert row["gflop_per_s"]["median"] == 2
    assert str(steady.key) == "MiniLM: steady fp32: embed, passages, 64 clients"
