"""What the processor of this machine can do."""

import re
from pathlib import Path

# The words of /proc/cpuinfo for products of bf16: x86's vectors and matrices, and those of ARM.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether the processor has instructions that multiply bf16. None: the system does not say.

    Programs compute bf16 on other processors as well: in fp32, with rounding between, slower than fp32.
    """
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return None
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return bool(_BF16_FLAGS & {*lines[0].split()}) if lines else None
