"""Renders a profile as an HTML page or as an SVG chart."""

from html import escape

from attnlens_analysis import page, svg
from attnlens_analysis.profile.measure import Profile
from attnlens_analysis.profile.parts import PARTS

_MB = 1e6


def as_page(profile: Profile) -> str:
    """Render the profile as an HTML page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("tokens", "ms", *PARTS, "attention", "memory, MB"))
    rows = []
    for each in profile.lengths:
        shares = [f"{100 * share:.1f} %" for share in (*each.shares.values(), each.attention_share)]
        cells = [f"{each.length:,}", f"{each.total_ms:,.2f}", *shares, f"{each.peak_bytes / _MB:,.1f}"]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    parts = "".join(
        f"<li><b>{escape(part)}</b>: {escape(description)}</li>" for part, description in PARTS.items()
    )
    warning = reliability(profile) and f"<p class='note'>{escape(reliability(profile))}</p>"
    body = (
        f"<p>{escape(describe(profile))}</p>\n<figure>{chart(profile)}</figure>\n"
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>\n"
        f"{warning}"
        f"<p>{escape(describe_crossover(profile))}</p><p>{escape(METHOD_NOTE)}</p><ul>{parts}</ul>"
    )
    return page.as_page(f"Where {profile.model_name} spends its time", body)


def chart(profile: Profile) -> str:
    """Render the shares of each part by length as an SVG chart."""
    return svg.stacked(
        f"{profile.model_name}: shares of run time by length",
        [f"{each.length:,} tokens" for each in profile.lengths],
        [list(each.shares.values()) for each in profile.lengths],
        list(PARTS),
    )


METHOD_NOTE = (
    "Shares are based on the time spent in nodes as reported by the ONNX Runtime profiler: the minimum of "
    "five runs of one text per node, with the same graph optimizations as in the server. ms is the fastest "
    "complete run. Memory is the peak usage of the ONNX Runtime allocator during the first run at a length, "
    "excluding parameters."
)


def describe(profile: Profile) -> str:
    """Describe the model, precision, attention mechanisms and number of threads."""
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
        "points. Other processes compete for the CPU. Measure again on an idle machine."
    )


def describe_crossover(profile: Profile) -> str:
    """Describe the length from which attention takes more than half of the time."""
    parts = "scores, softmax and values"
    if profile.overtakes_at is None:
        last = profile.lengths[-1]
        return (
            f"Up to {last.length:,} tokens, {parts} take less than half of the time "
            f"({100 * last.attention_share:.1f} % at {last.length:,} tokens)."
        )
    if profile.overtakes_at == profile.lengths[0].length:
        return f"At all measured lengths, {parts} take more than half of the time."
    return f"From about {profile.overtakes_at:,} tokens, {parts} take more than half of the time."
