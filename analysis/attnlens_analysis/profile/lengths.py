"""Parsing and selection of the lengths to profile."""

import re
from pathlib import Path

from attnlens_analysis.errors import LengthError
from attnlens_server.bundle import Bundle

_RANGE = re.compile(r"([0-9]{1,7})\.\.([0-9]{1,7})")
_ONE = re.compile(r"[0-9]{1,7}")
_GB = 1e9
# Scores, masked scores and weights of a layer may be allocated at the same time.
_COPIES = 3


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parse lengths in tokens: a list such as `16,100,500`, or a range such as `16..4096` in powers of 2.

    Raises:
        LengthError: The format is invalid, or a length is 0.
    """
    lengths: set[int] = set()
    for part in text.replace(" ", "").split(","):
        if match := _RANGE.fullmatch(part):
            length, last = int(match[1]), int(match[2])
            while 0 < length <= last:
                lengths.add(length)
                length *= 2
        elif _ONE.fullmatch(part):
            lengths.add(int(part))
    is_valid = all(_RANGE.fullmatch(p) or _ONE.fullmatch(p) for p in text.replace(" ", "").split(","))
    if not is_valid or not lengths or min(lengths) < 1:
        raise LengthError(
            f"invalid lengths {text!r}. Use a list or range of positive numbers, e.g. 16,100,500 or 16..4096."
        )
    return tuple(sorted(lengths))


def chosen_lengths(bundle: Bundle, requested: tuple[int, ...]) -> tuple[tuple[int, ...], list[str]]:
    """Return the lengths that can be measured, and messages about skipped ones.

    Raises:
        LengthError: No length can be measured.
    """
    limit = bundle.model.max_positions
    kept = [length for length in requested if length <= limit]
    messages = []
    if len(kept) < len(requested):
        listed = ", ".join(f"{length:,}" for length in requested if length > limit)
        messages.append(f"skipped {listed} tokens: {bundle.model.name} supports up to {limit:,}")
    available = _available_bytes()
    fitting = [length for length in kept if available is None or _bytes_of(bundle, length) < available]
    if len(fitting) < len(kept):
        listed = ", ".join(
            f"{length:,} tokens (about {_bytes_of(bundle, length) / _GB:.1f} GB)"
            for length in kept
            if length not in fitting
        )
        messages.append(f"skipped {listed}: only {(available or 0) / _GB:.1f} GB of memory are available")
    if not fitting:
        raise LengthError(f"no length can be measured ({'; '.join(messages)}). Use shorter lengths.")
    return tuple(fitting), messages


def _bytes_of(bundle: Bundle, length: int) -> int:
    """Estimate the size of a layer's scores and weights in fp32."""
    outputs = [output for output in bundle.model.graphs["attention"].outputs if output.layer is not None]
    values = max((output.num_values(length, output.num_heads) for output in outputs), default=0)
    return 4 * _COPIES * values


def _available_bytes() -> int | None:
    """Return the available memory according to Linux, or None if unknown."""
    try:
        content = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"^MemAvailable: +([0-9]+) kB$", content, re.MULTILINE)
    return None if match is None else 1024 * int(match[1])
