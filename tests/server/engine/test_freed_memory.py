"""Freed memory is returned to the operating system."""

import platform
import subprocess
import sys

import pytest

FREEING = """
import re
from pathlib import Path
from attnlens_server.engine.sessions import give_back_freed_memory

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

blocks = [bytes(4096) for _ in range(16_384)]
last = bytes(4096)  # the last allocation, which keeps the heap from shrinking at its end
del blocks
before = resident_mib()
give_back_freed_memory()
print(before - resident_mib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep no freed memory")
def test_freed_memory_below_an_allocation_is_returned_to_the_system() -> None:
    result = subprocess.run([sys.executable, "-c", FREEING], capture_output=True, check=True, text=True)
    assert float(result.stdout) > 32  # 64 MiB each
