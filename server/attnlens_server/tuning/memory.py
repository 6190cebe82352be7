"""What Linux says of memory. Other systems are not asked."""

import re
from pathlib import Path

_PROCESS = Path("/proc/self/status")
_SYSTEM = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def resident_bytes() -> int | None:
    """Return what this process has in memory; None: it is not known."""
    return _entry(_PROCESS, "VmRSS")


def available_bytes(system: Path = _SYSTEM, container: Path = _CONTAINER) -> int | None:
    """Return what is left for more processes, in the machine and in the container; None: it is not known.

    Args:
        system: the system's file with its counts.
        container: the folder of the control group, version 2.
    """
    in_system = _entry(system, "MemAvailable")
    try:
        limit, used = ((container / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return in_system
    if in_system is None or limit == "max":
        return in_system
    return min(in_system, max(0, int(limit) - int(used)))


def _entry(path: Path, name: str) -> int | None:
    try:
        content = path.read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(rf"^{name}:\s*([0-9]+) kB$", content, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])
