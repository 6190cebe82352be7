"""A profile as one HTML page with a chart, and as the chart alone."""

from html import escape

from attnlens_analysis import page, svg
from attnlens_analysis.profile.measure import Profile
from attnlens_analysis.profile.parts import PARTS

_MB = 1e6


def as_page(profile: Profile) -> str:
    """Return the page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("tokens", "ms", *PARTS, "attention", "memory, MB"))
    rows = []
    for each in profile.lengths:
        shares = [f"{100 * share:.1f} %" for share in (*each.shares.values(), each.attention_share)]
        cells = [f"{each.length:,}", f"{each.total_ms:,.2f}", *shares, f"{each.peak_bytes / _MB:,.1f}"]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    parts = "".join(f"<li><b>{escape(part)}</b>: {escape(what)}</li>" for part, what in PARTS.items())
    warning = reliability(profile) and f"<p class='mind'>{escape(reliability(profile))}</p>"
    body = (
        f"<p>{escape(describe(profile))}</p>\n<figure>{chart(profile)}</figure>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>\n"
        f"{warning}"
        f"<p>{escape(overtaking(profile))}</p><p>{escape(HOW)}</p><ul>{parts}</ul>"
    )
    return page.as_page(f"Where {profile.model_name} spends its time", body)


def chart(profile: Profile) -> str:
    """Return the chart: a bar of shares for each length."""
    return svg.stacked(
        f"{profile.model_name}: shares of the time by length",
        [f"{each.length:,} tokens" for each in profile.lengths],
        [list(each.shares.values()) for each in profile.lengths],
        list(PARTS),
    )


HOW = (
    "Shares are of the time in nodes, of each node the quickest of five runs of one text, as ONNX Runtime's "
    "profiler has them, with the graph optimised as it is when served; ms is the quickest whole run. "
    "Memory is the most that ONNX Runtime's allocator had in use for values during "
    "the first run at a length, parameters not counted."
)


def describe(profile: Profile) -> str:
    """Say what was measured."""
    threads = f"{profile.threads} thread{'s' if profile.threads > 1 else ''}"
    return f"{profile.model_name}, {profile.precision}, attention {', '.join(profile.mechanisms)}, {threads}"


def reliability(profile: Profile) -> str:
    """Return a warning if the runs of a length disagree, otherwise an empty string."""
    if not profile.unreliable_lengths:
        return ""
    lengths = ", ".join(f"{length:,}" for length in profile.unreliable_lengths)
    spread = max(each.share_spread for each in profile.lengths)
    return (
        f"Unreliable: at {lengths} tokens the runs disagree on shares by up to {100 * spread:.0f} percentage "
        "points. Other processes compete for the CPU: measure again on an idle machine."
    )


def overtaking(profile: Profile) -> str:
    """Say from which length on attention takes more than all else."""
    what = "scores, softmax and values"
    if profile.overtakes_at is None:
        last = profile.lengths[-1]
        return (
            f"Up to {last.length:,} tokens, {what} do not take more than all else: "
            f"{100 * last.attention_share:.1f} % there."
        )
    if profile.overtakes_at == profile.lengths[0].length:
        return f"At every length measured, {what} take more than all else."
    return f"From about {profile.overtakes_at:,} tokens on, {what} take more than all else."
