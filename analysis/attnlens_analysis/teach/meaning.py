"""The steps about what a head means: how many heads agree, what q.k is not, and what it costs."""

from attnlens_analysis.teach.content import Bars, Grid, Step, Table, number, percent
from attnlens_analysis.teach.numbers import chance_of_own, is_own_largest, joined
from attnlens_analysis.teach.values import Question

_KB = 1000


def count_heads(question: Question) -> Step:
    """Count the heads in which the token attends more to the target than to the rival."""
    row, to, than = question.row, question.target, question.rival
    by_layer = {layer: values.weights[:, row, to] for layer, values in question.layers.items()}
    total = sum(len(weights) for weights in by_layer.values())
    best_layer = max(by_layer, key=lambda layer: float(by_layer[layer].max()))
    best_head = int(by_layer[best_layer].argmax())
    token, target = question.label(row), question.label(to)
    text = [(f"Does “{token}” attend to “{target}”? Most in layer {best_layer}, head {best_head}: "
            f"{number(by_layer[best_layer].max())}.")]  # fmt: skip
    if than is not None:
        rival = question.label(than)
        more = sum(
            int((weights > question.layers[layer].weights[:, row, than]).sum())
            for layer, weights in by_layer.items()
        )
        text.append(
            f"In {more} of {total} heads “{token}” gives “{target}” more than “{rival}”; if heads tossed a "
            f"coin, it would be {total / 2:g}."
        )
    width = max(len(weights) for weights in by_layer.values())
    return Step(
        title="One head sees it; does the model?",
        formula="a[layer, head, token, target] over all layers and heads",
        text=text,
        picture=Grid(
            f"The weight that “{token}” gives “{target}”: a row for each layer, a column for each head",
            [f"layer {layer}" for layer in by_layer],
            [str(head) for head in range(width)],
            [[*weights.tolist(), *[0.0] * (width - len(weights))] for weights in by_layer.values()],
        ),
        to_try=[
            (
                "Change the text so that the answer should change (“tired” to “wide”), and count again with "
                f"--to and --rather-than. A head that gives “{target}” the same weight then does not resolve "
                "the word."
            )
        ],
        caveat="A head picked because it fits the story will fit it. What a token's weights do to the result "
        "is another question than where they go.",
    )


def tie_projections(question: Question) -> Step:
    """Show that tokens do not attend to themselves by nature, and would if queries were keys."""
    layers = question.layers.values()
    own = float(joined(is_own_largest(each.weights) for each in layers).mean())
    chance = chance_of_own(joined(each.allowed for each in layers))
    tied = float(joined(is_own_largest(each.weights_with(query=each.key)) for each in layers).mean())
    labels = question.sentence.labels
    return Step(
        title="A token does not attend to itself by nature",
        formula="q_i·k_i is no |x_i|²: W_q and W_k differ, so the diagonal is nothing special",
        text=[
            (
                f"The diagonal is the largest weight in {percent(own)} of the rows of all heads; by "
                f"chance it would be in {percent(chance)}."
            ),
            f"With W_q := W_k, that is q := k, it is the largest in {percent(tied)}.",
        ],
        picture=Grid(
            f"All weights of layer {question.layer}, head {question.head}: a row for each token",
            labels,
            labels,
            question.values.weights[question.head].tolist(),
        ),
        to_try=[
            "Tie the projections, with d from above:",
            's = d["scale"] * d["k"] @ d["k"].T + d["bias"]',
            "(s.argmax(-1) == np.arange(len(s))).mean()  # of this head",
        ],
        caveat="Dot products measure likeness only where both sides come from the same map. The model never "
        "saw tied projections in training.",
    )


def measure_quadratic_cost(question: Question) -> Step:
    """Show time and size against length."""
    lengths = [length for length, _, _ in question.costs]
    times = [milliseconds for _, milliseconds, _ in question.costs]
    table = Table(
        ("tokens", "all maps, kB", "time, ms"),
        [(f"{length:,}", f"{size / _KB:,.0f}", f"{ms:,.1f}") for length, ms, size in question.costs],
    )
    (first, fast, small), (last, slow, large) = question.costs[0], question.costs[-1]
    return Step(
        title="The cost grows with the square of the length",
        formula="T x T weights for each head; T² K products for the scores and as many for the context",
        text=[
            (
                f"From {first} to {last} tokens, x{last / first:.3g}, the maps grow "
                f"x{large / small:,.0f} and the time of the graph x{slow / fast:.3g}. Projections and "
                "feed-forward grow with T, and have the larger part of a short text's time."
            ),
        ],
        picture=Bars(
            "Milliseconds of the graph with attention, one thread",
            [f"{length:,} tokens" for length in lengths],
            times,
            decimals=1,
        ),
        to_try=["See which part takes the time at each length:", "attnlens profile DIR --lengths 16..4096"],
        caveat=f"Measured on this machine. The model takes {question.max_positions:,} tokens at most.",
        table=table,
    )
