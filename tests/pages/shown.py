"""Comparison of printed output with a page."""

import re

NUMBER = re.compile(r"[+-]?(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
# Output that depends on the machine, on the start, or on rounding.
VARIES = [
    (re.compile(r"(127\.0\.0\.1|0\.0\.0\.0|localhost):\d+"), "HOST:PORT"),
    (re.compile(r"unix:\S+?(?=:? |:?$)"), "unix:PATH"),
    (
        re.compile(r"\d+ threads?, \d+ lanes?, batches of [\d,]+ tokens, warm-up [\d.]+ s"),
        "THREADS, LANES, BATCHES, WARM-UP",
    ),
    (re.compile(r"off by \d\S*?(?=\)?\.?$)"), "off by LITTLE"),
    (re.compile(r"version='[0-9a-f]{12}'"), "version='VERSION'"),
    (re.compile(r"█+|▒+"), "BAR"),
    (re.compile(r"─+"), "RULE"),
]
ANYTHING = "..."


def difference(shown: str, printed: str) -> str:
    """Describe the first difference, or return "" if there is none.

    Words must be equal. Numbers may differ by one unit in the last expected digit. A line `...` matches
    any number of lines. Trailing and repeated spaces are ignored.
    """
    wanted = [line for line in map(_plain, shown.strip().splitlines()) if line]
    found = [line for line in map(_plain, printed.strip().splitlines()) if line]
    at, may_skip = 0, False
    for line in wanted:
        if line == ANYTHING:
            may_skip = True
            continue
        places = range(at, len(found)) if may_skip else range(at, min(at + 1, len(found)))
        place = next((place for place in places if _alike(line, found[place])), None)
        if place is None:
            rest = "\n".join(found[at : at + 3]) or "nothing"
            return f"shown:   {line}\nprinted: {rest}"
        at, may_skip = place + 1, False
    return "" if may_skip or at == len(found) else f"printed, not shown: {found[at]}"


def _plain(line: str) -> str:
    for pattern, name in VARIES:
        line = pattern.sub(name, line)
    return " ".join(line.split())


def _alike(shown: str, printed: str) -> bool:
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(_near(first, second) for first, second in pairs)


def _near(shown: str, printed: str) -> bool:
    first, second = (float(number.replace(",", "")) for number in (shown, printed))
    decimals = len(shown.partition(".")[2]) if "e" not in shown else 0
    if not decimals:
        return first == second
    return abs(first - second) <= max(1.01 * 10.0**-decimals, 2e-6)
