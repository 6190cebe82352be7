"""Short forms of the soak and fuzz tests of `make proof`."""

from pathlib import Path

import pytest

from bench.studies.fuzz import fuzz
from bench.studies.soak import report, soak

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
SEED = 26


def test_attacked_server_loses_no_request_and_returns_no_wrong_result(minilm_bundle: Path) -> None:
    """Latency and memory are not judged here, because other tests run at the same time."""
    rows = report(soak(minilm_bundle, minutes=0.5, seed=SEED), SEED)
    assert {row.name: row.defects for row in rows if row.defects} == {}
    assert all(row.good.requests for row in rows[1:])


def test_mutated_requests_cause_no_defect(minilm_bundle: Path) -> None:
    defects = []
    for name, found, found_defects in fuzz(minilm_bundle, 4000, 500, SEED):
        assert found.sent > 0, name
        defects += found_defects
    assert defects == []
