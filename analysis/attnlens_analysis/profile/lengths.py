"""The lengths to measure: as they are asked for, and those of them that can be measured."""

import re
from pathlib import Path

from attnlens_analysis.errors import LengthError
from attnlens_server.bundle import Bundle

_RANGE = re.compile(r"([0-9]{1,7})\.\.([0-9]{1,7})")
_ONE = re.compile(r"[0-9]{1,7}")
_GB = 1e9
# Scores, scores with the mask added, and weights of a layer may be there at the same time.
_COPIES = 3


def parse_lengths(text: str) -> tuple[int, ...]:
    """Read lengths in tokens: a list as `16,100,500`, or `16..4096`, which doubles.

    Raises:
        LengthError: it is neither, or has the length 0.
    """
    lengths: set[int] = set()
    for part in text.replace(" ", "").split(","):
        if found := _RANGE.fullmatch(part):
            length, last = int(found[1]), int(found[2])
            while 0 < length <= last:
                lengths.add(length)
                length *= 2
        elif _ONE.fullmatch(part):
            lengths.add(int(part))
    parts_are_known = all(_RANGE.fullmatch(p) or _ONE.fullmatch(p) for p in text.replace(" ", "").split(","))
    if not parts_are_known or not lengths or min(lengths) < 1:
        raise LengthError(f"{text!r} are no lengths: give for instance 16,100,500 or 16..4096, from 1 on")
    return tuple(sorted(lengths))


def chosen_lengths(bundle: Bundle, asked: tuple[int, ...]) -> tuple[tuple[int, ...], list[str]]:
    """Return the lengths that can be measured, and a message for those left out.

    Raises:
        LengthError: none can be.
    """
    limit = bundle.model.max_positions
    kept = [length for length in asked if length <= limit]
    messages = []
    if len(kept) < len(asked):
        listed = ", ".join(f"{length:,}" for length in asked if length > limit)
        messages.append(f"left out: {listed} tokens; {bundle.model.name} has positions for {limit:,}")
    available = _available_bytes()
    fitting = [length for length in kept if available is None or _bytes_of(bundle, length) < available]
    if len(fitting) < len(kept):
        listed = ", ".join(
            f"{length:,} tokens (about {_bytes_of(bundle, length) / _GB:.1f} GB)"
            for length in kept
            if length not in fitting
        )
        messages.append(
            f"left out, as this machine has {(available or 0) / _GB:.1f} GB of memory free: {listed}"
        )
    if not fitting:
        raise LengthError(f"no length is left to measure ({'; '.join(messages)}): give shorter ones")
    return tuple(fitting), messages


def _bytes_of(bundle: Bundle, length: int) -> int:
    """Estimate what a layer's scores and weights take in fp32."""
    outputs = [output for output in bundle.model.graphs["attention"].outputs if output.layer is not None]
    values = max((output.num_values(length, output.num_heads) for output in outputs), default=0)
    return 4 * _COPIES * values


def _available_bytes() -> int | None:
    """Return the memory that Linux says is available; None: it is not known."""
    try:
        content = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable: +([0-9]+) kB$", content, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])
