"""Lesson steps on one row of weights: the choice of the softmax, its temperature, and masks."""

import numpy as np

from attnlens_analysis.teach.content import Grid, Step, Table, number
from attnlens_analysis.teach.numbers import Array, sharpness, softmax
from attnlens_analysis.teach.values import NUM_PADDING, HeadTrace

_TEMPERATURES = (0.5, 1.0, 2.0, 4.0)


def vary_temperature(trace: HeadTrace) -> Step:
    """Compare the softmax with plain division, and at several temperatures."""
    values, head, row = trace.values, trace.head, trace.row
    scores, allowed = values.scores[head, row], values.allowed[head, row]
    rows = {each: softmax(scores / each, allowed) for each in _TEMPERATURES}
    kept = scores[allowed]
    divided = kept / (kept.sum() or 1.0)
    raised = scores + (np.arange(len(scores)) == trace.target)
    before, after = (softmax(each, allowed)[trace.target] for each in (scores, raised))
    text = [
        (
            f"{int((kept < 0).sum())} of {len(kept)} scores are negative. Divided by their sum, "
            f"{number(kept.sum())}, they would give “weights” from {number(divided.min())} to "
            f"{number(divided.max())}."
        ),
        (
            f"If the score of “{trace.label(trace.target)}” rises by 1, its weight changes "
            f"from {number(before)} to {number(after)}: the ratio to each other weight is multiplied by "
            "e = 2.7183."
        ),
    ]
    table = Table(
        ("temperature", "entropy, nats", "largest weight", "trace of the Jacobian"),
        [
            (f"{each:g}", number(sharp.entropy), number(sharp.largest), number(sharp.trace / each))
            for each, sharp in ((each, sharpness(weights)) for each, weights in rows.items())
        ],
    )
    return Step(
        key="temperature",
        title="Why a softmax",
        explanation=(
            "Raw scores are unbounded and can be negative; divided by their sum, they can be negative, "
            "larger than 1, or undefined. The softmax maps any scores to weights between 0 and 1 that sum to"
            " 1. It depends only on differences of scores, and is smooth, so every score has a gradient. "
            "Dividing the scores by a temperature t above 1 makes the row more uniform, below 1 sharper. The "
            "derivatives approach 0 in both directions: at low t because one weight approaches 1, at high t "
            "because of the factor 1/t. (j = m) is 1 if j is m, and otherwise 0."
        ),
        formula="a_j = exp(s_j / t) / sum over m of exp(s_m / t),  "
        "Jacobian: da_j/ds_m = a_j ((j = m) - a_m) / t",
        text=text,
        picture=Grid(
            f"The weights of “{trace.label(row)}” at four temperatures",
            [f"t = {each:g}" for each in _TEMPERATURES],
            trace.sentence.labels,
            [weights.tolist() for weights in rows.values()],
        ),
        to_try=[
            "Use another temperature t:",
            f's = d["scores"][{row}] / t; a = np.exp(s - s.max()); a / a.sum()',
        ],
        caveat="Weights depend on the other scores in the row, so weights of different rows cannot be "
        "compared like scores.",
        table=table,
    )


def apply_masks(trace: HeadTrace) -> Step:
    """Recompute a row under a causal mask and with padding."""
    values, head, row = trace.values, trace.head, trace.row
    scores, allowed = values.scores[head], values.allowed[head]
    positions = np.arange(len(scores))
    earlier = positions[:, None] >= positions
    causal = allowed & earlier
    weights, masked = values.weights[head, row], softmax(scores[row], causal[row])
    # Keys of later tokens are replaced by keys with the opposite scores.
    changed = np.where(earlier, scores, -scores)
    free, blocked = (
        float(np.abs(softmax(changed, each) - softmax(scores, each)).max()) for each in (allowed, causal)
    )
    rows = {"as computed": weights, "causal": masked}
    text = [
        (
            f"The causal row keeps {int(causal[row].sum())} of {int(allowed[row].sum())} keys and sums to "
            f"{number(masked.sum())}. Replacing the scores of all later tokens changes weights of this head "
            f"by up to {number(free)} without the mask, and by {number(blocked)} with it: no look-ahead."
        )
    ]
    if trace.padded is not None:
        rows["padded"] = trace.padded[: len(weights)]
        text.append(_describe_padding(trace.padded, weights))
    target = trace.target
    return Step(
        key="masks",
        title="Masks: causal and padding",
        explanation=(
            "A mask sets scores to -∞ before the softmax. exp(-∞) is 0, so these keys get the weight 0 and "
            "do not contribute to the denominator: the row still sums to 1, unless all keys are hidden. A "
            "causal mask hides later tokens, as in language models that generate text. A padding mask hides "
            "the tokens that fill the shorter texts of a batch. Setting weights to 0 after the softmax "
            "instead would leave rows that sum to less than 1."
        ),
        formula="s_ij = -∞ for j > i (causal) or if j is padding   (query i, key j)",
        text=text,
        picture=Grid(
            f"The weights of “{trace.label(row)}” under each mask",
            list(rows),
            trace.sentence.labels,
            [each.tolist() for each in rows.values()],
        ),
        to_try=[
            "Apply a causal mask to the whole head:",
            's = np.where(np.tri(len(d["scores"])) > 0, d["scores"], -np.inf)',
            "a = np.exp(s - s.max(-1, keepdims=True)); a / a.sum(-1, keepdims=True)",
        ],
        caveat="If all keys of a row are masked, the softmax is 0 / 0, which is NaN. Exported encoders "
        "therefore use a large negative number instead of -∞. This alone would give equal weights to the "
        "masked keys, so graphs with attention weights also multiply them by the mask: such a row is 0.",
        table=Table(
            ("row", "keys", f"weight of {trace.label(target)}", "sum"),
            [
                (name, str(int((each > 0).sum())), number(each[target]), number(each.sum()))
                for name, each in rows.items()
            ],
        ),
    )


def _describe_padding(padded: Array, weights: Array) -> str:
    """Compare the row (T + P,) of a text with padding with the row (T,) without."""
    real, padding = padded[: len(weights)], padded[len(weights) :]
    return (
        f"With {NUM_PADDING} padding tokens appended, this model gives them the weight "
        f"{number(padding.sum())}; the row sums to {number(padded.sum())} and differs by "
        f"{_rounding(real, weights)} from the row without padding."
    )


def _rounding(first: Array, second: Array) -> str:
    difference = float(np.abs(first - second).max())
    return "less than 1e-6" if difference < 1e-6 else f"up to {number(difference)}"  # noqa: PLR2004 - rounding of fp32
