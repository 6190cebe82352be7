"""Number of CPUs that this process may use.

On Linux, this is the number that loky returns. loky is only imported on other systems, because its import
takes 54 ms and 7 MiB.
"""

import math
import os
import sys
from collections.abc import Collection
from pathlib import Path

_LIMIT = "LOKY_MAX_CPU_COUNT"
_CGROUPS = Path("/sys/fs/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")


def count_cpus(*, only_physical_cores: bool = False) -> int:
    """Return the number of logical or physical CPUs within the affinity, the cgroup quota and _LIMIT."""
    if sys.platform != "linux":
        from loky import cpu_count  # noqa: PLC0415 - see above

        count: int = cpu_count(only_physical_cores=only_physical_cores)
        return count
    cpus = os.sched_getaffinity(0)
    count = _count_cores(_CPU_INFO, cpus) if only_physical_cores else len(cpus)
    num_cpus = os.cpu_count() or 1
    return max(1, min(num_cpus, count, _quota(_CGROUPS) or num_cpus, int(os.environ.get(_LIMIT, num_cpus))))


def _count_cores(cpu_info: Path, cpus: Collection[int]) -> int:
    """Return the number of physical cores with one of these logical CPUs, or of CPUs if it is unknown."""
    cores = set()
    for block in cpu_info.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        lines = (line.partition(":") for line in block.splitlines())
        fields = {key.strip(): value.strip() for key, _, value in lines}
        if "core id" in fields and int(fields.get("processor", -1)) in cpus:
            cores.add((fields.get("physical id"), fields["core id"]))
    return len(cores) or len(cpus)


def _quota(cgroups: Path) -> int | None:
    """Return the quota of the cgroup in CPUs, rounded up, or None without a quota."""
    try:
        quota_us, period_us = (cgroups / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # version 1 of cgroups
        try:
            quota_us, period_us = (
                (cgroups / "cpu" / name).read_text(encoding="ascii").strip()
                for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        except OSError:
            return None
    if quota_us == "max" or int(quota_us) <= 0 or int(period_us) <= 0:
        return None
    return math.ceil(int(quota_us) / int(period_us))
