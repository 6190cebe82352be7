"""Lesson steps on interpretation and cost: agreement of heads, tied projections and quadratic cost."""

from attnlens_analysis.teach.content import Bars, Grid, Step, Table, number, percent
from attnlens_analysis.teach.numbers import chance_of_own, is_own_largest, joined
from attnlens_analysis.teach.values import HeadTrace
from attnlens_analysis.timing import METHOD

_KB = 1000


def count_heads(trace: HeadTrace) -> Step:
    """Count the heads in which the token attends more to the target than to the rival."""
    row, target_row, rival_row = trace.row, trace.target, trace.rival
    by_layer = {layer: values.active_weights[:, row, target_row] for layer, values in trace.layers.items()}
    total = sum(len(weights) for weights in by_layer.values())
    best_layer = max(by_layer, key=lambda layer: float(by_layer[layer].max()))
    best_head = int(by_layer[best_layer].argmax())
    token, target = trace.label(row), trace.label(target_row)
    text = [(f"Does “{token}” attend to “{target}”? Strongest in layer {best_layer}, head {best_head}: "
            f"{number(by_layer[best_layer].max())}.")]  # fmt: skip
    gates = [values.gates[row] for values in trace.layers.values() if values.gates is not None]
    inactive = sum(int((each == 0).sum()) for each in gates)
    if rival_row is not None:
        rival = trace.label(rival_row)
        more = sum(
            int((weights > trace.layers[layer].active_weights[:, row, rival_row]).sum())
            for layer, weights in by_layer.items()
        )
        text.append(
            f"In {more} of {total - inactive} heads, “{token}” attends more to “{target}” than to “{rival}”. "
            f"By chance, it would be {(total - inactive) / 2:g}."
        )
    if inactive:
        text.append(
            f"{inactive} more heads are inactive for “{token}”: their gates are 0. They are shown as 0."
        )
    width = max(len(weights) for weights in by_layer.values())
    return Step(
        key="agreement",
        title="One head attends to it; does the model use it?",
        explanation=(
            "With many heads, some head attends to any given token. A single head therefore shows "
            "little; the comparison with another token over all heads shows more."
        ),
        formula="a[layer, head, token, target] over all layers and heads",
        text=text,
        picture=Grid(
            f"Weight from “{token}” to “{target}”: one row per layer, one column per head",
            [f"layer {layer}" for layer in by_layer],
            [str(head) for head in range(width)],
            [[*weights.tolist(), *[0.0] * (width - len(weights))] for weights in by_layer.values()],
        ),
        to_try=[
            (
                "Change the text so that the answer should change (“tired” to “wide”), and count again with "
                f"--to and --rather-than. A head with the same weight on “{target}” does not resolve the "
                "reference."
            )
        ],
        caveat="A head selected to match an expectation will match it. Where a head attends does not show "
        "how it affects the result.",
    )


def tie_projections(trace: HeadTrace) -> Step:
    """Show that tokens do not generally attend to themselves, but would if queries were keys."""
    layers = trace.layers.values()
    own = float(joined(is_own_largest(each.weights) for each in layers).mean())
    chance = chance_of_own(joined(each.allowed for each in layers))
    tied = float(joined(is_own_largest(each.weights_with(query=each.key)) for each in layers).mean())
    labels = trace.sentence.labels
    return Step(
        key="diagonal",
        title="Tokens do not generally attend to themselves",
        explanation=(
            "A vector is most similar to itself, so one might expect each token to attend most to "
            "itself. But q·k is not a similarity of x: queries and keys come from different matrices."
        ),
        formula="q_i·k_i is not |x_i|²: W_Q and W_K differ, so the diagonal is not special",
        text=[
            (
                f"The diagonal has the largest weight in {percent(own)} of the rows of all heads. By chance, "
                f"it would be {percent(chance)}."
            ),
            (
                f"With W_Q = W_K and b_Q = b_K, and therefore q = k, it would be {percent(tied)}. Even then, "
                "a longer key in a similar direction can have a larger product with q than its own key."
            ),
            _compare_with_itself(trace),
        ],
        picture=Grid(
            f"All weights of layer {trace.layer}, head {trace.head}: one row per token",
            labels,
            labels,
            trace.values.weights[trace.head].tolist(),
        ),
        to_try=[
            "Tie the projections, with d from the step “Query, key and value”:",
            's = d["scale"] * d["k"] @ d["k"].T + d["bias"]',
            "(s.argmax(-1) == np.arange(len(s))).mean()  # for this head",
        ],
        caveat="A dot product measures similarity only if both vectors come from the same projection. The "
        "model was not trained with tied projections.",
    )


def _compare_with_itself(trace: HeadTrace) -> str:
    """Compare the scores of the token for itself and for the target."""
    values, head, row, target = trace.values, trace.head, trace.row, trace.target
    products = values.query[head, row] @ values.key[head].T
    inner = values.entering[row] @ values.entering.T
    token, other = trace.label(row), trace.label(target)
    return (
        f"In this head, q·k of “{token}” is {number(products[row])} with itself and "
        f"{number(products[target])} with “{other}”. The dot products of x are {number(inner[row])} and "
        f"{number(inner[target])}."
    )


def measure_quadratic_cost(trace: HeadTrace) -> Step:
    """Show how time and size grow with the length."""
    lengths = [length for length, _, _ in trace.costs]
    times = [milliseconds for _, milliseconds, _ in trace.costs]
    table = Table(
        ("tokens", "all maps, kB", "time, ms"),
        [(f"{length:,}", f"{size / _KB:,.0f}", f"{ms:,.1f}") for length, ms, size in trace.costs],
    )
    (first, fast, small), (last, slow, large) = trace.costs[0], trace.costs[-1]
    text = [METHOD]
    if last > first:
        text.insert(
            0,
            f"From {first} to {last} tokens (x{last / first:.3g}), the size of the maps grows "
            f"x{large / small:,.0f} and the time of the graph x{slow / fast:.3g}. Projections and "
            "feed-forward layers grow linearly with T and dominate for short texts.",
        )
    return Step(
        key="cost",
        title="The maps grow with the square of the length",
        explanation=(
            "Each token attends to each other token, so the number of weights grows with the square of "
            "the length. The time approaches this only for long texts."
        ),
        formula="T x T weights per head; T² d_k multiplications each for the scores and the context",
        text=text,
        picture=Bars(
            "Time of the attention graph in ms, one thread",
            [f"{length:,} tokens" for length in lengths],
            times,
            decimals=1,
        ),
        to_try=["Profile the parts of the model by length:", "attnlens profile DIR --lengths 16..4096"],
        caveat=f"Measured on this machine. The model supports up to {trace.max_positions:,} tokens.",
        table=table,
    )
