"""The number of CPUs equals that of loky, which is the test oracle."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import loky
import pytest
from loky.backend import context

from attnlens_server.engine import cpus
from attnlens_server.engine.cpus import count_cpus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="loky counts the CPUs elsewhere")

# Two sockets with two cores each, whose ids repeat, and two logical CPUs per core.
CPU_INFO = "\n\n".join(
    f"processor\t: {number}\nmodel name\t: a: b\nphysical id\t: {number // 2 % 2}\ncore id\t\t: {number % 2}"
    for number in range(8)
)


@pytest.fixture(autouse=True)
def _all_cpus() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("only_physical_cores", [False, True])
@pytest.mark.parametrize("limit", [None, "1", "1000"])
def test_number_of_cpus_equals_that_of_loky(
    only_physical_cores: bool, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        monkeypatch.setenv("LOKY_MAX_CPU_COUNT", limit)
    expected = loky.cpu_count(only_physical_cores=only_physical_cores)
    assert count_cpus(only_physical_cores=only_physical_cores) == expected
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    assert count_cpus(only_physical_cores=only_physical_cores) == 1


@pytest.mark.parametrize(
    ("allowed", "count"), [({0, 1, 2, 3, 4, 5, 6, 7}, 4), ({0, 4}, 1), ({0, 2}, 2), ({1, 3, 5}, 2)]
)
def test_logical_cpus_of_a_core_count_once(allowed: set[int], count: int, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPU_INFO)
    assert cpus._count_cores(path, allowed) == count


def test_cpus_are_counted_if_cores_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n\nprocessor\t: 1\nBogoMIPS\t: 50.00\n")
    assert cpus._count_cores(path, {0, 1}) == 2


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100001\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_quota_of_a_cgroup_is_rounded_up(files: dict[str, str], quota: int | None, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cpus._quota(tmp_path) == quota


def test_cpus_and_quota_of_this_machine_equal_those_of_loky() -> None:
    num_cpus = os.cpu_count() or 1
    assert (cpus._quota(cpus._CGROUPS) or num_cpus) == context._cpu_count_cgroup(num_cpus)
