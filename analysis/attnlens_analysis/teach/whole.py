"""Lesson steps beyond one row: inputs of heads, all layers, contexts of a word, and subspaces."""

from itertools import pairwise

import numpy as np

from attnlens_analysis.teach.content import Bars, Step, Table, number, percent
from attnlens_analysis.teach.diagrams import heads_diagram, stack_diagram
from attnlens_analysis.teach.numbers import Array, cosine, norms, principal_cosines
from attnlens_analysis.teach.values import HeadTrace

_NUM_SCORES = 5
_NUM_RANDOM = 16
_NO_PROJECTIONS = "The graph does not store W_Q and W_K in floating point, so this cannot be computed."


def project_all_features(trace: HeadTrace) -> Step:
    """Show that a head reads all features of x, not a slice."""
    values, sizes = trace.values, trace.sizes
    matrices = trace.head_matrices
    if matrices is None:
        text, table = [_NO_PROJECTIONS], None
    else:
        (query, query_bias), (key, key_bias) = matrices
        size = max(1, sizes.hidden // sizes.heads)
        inside = np.arange(sizes.hidden) // size == trace.head
        full, sliced = (
            values.scale * (x[trace.row] @ query + query_bias) @ (x @ key + key_bias).T
            for x in (values.entering, values.entering * inside)
        )
        outside = float((query[~inside] ** 2).sum() / (query**2).sum())
        order = np.argsort(-full)[:_NUM_SCORES]
        first = trace.head * size
        rotated = " before rotary embeddings" if values.is_rotated else ""
        text = [
            (
                f"W_Q of this head has the shape {list(query.shape)}: one row for each of the {sizes.hidden} "
                f"features. Features outside of “its” slice, {first} to {first + size - 1}, have "
                f"{percent(outside)} of the sum of its squared entries. If all rows had the same norm, it "
                f"would be {percent(1 - size / sizes.hidden)}."
            ),
            (
                f"The table shows scores{rotated}: computed from x, and from x with all features outside of "
                f"the slice set to 0. They differ by up to {number(float(np.abs(full - sliced).max()))}."
            ),
        ]
        table = Table(
            ("token", "all of x", "only its slice of x"),
            [(trace.label(j), number(full[j]), number(sliced[j])) for j in order],
        )
    return Step(
        key="heads",
        title="Heads do not slice the input",
        explanation=(
            "All tokens share the projections, and all heads of a layer read the whole x. Each head has its "
            "own W_Q, W_K and W_V with D input features. Implementations compute all heads with one large "
            "matrix and reshape the result, which splits Q, K and V, not x. The contexts are then "
            "concatenated and mixed by W_O; without W_O, each feature of the output would come from one head."
        ),
        formula="Q_h = x W_Q[:, columns of head h] + b_Q[columns of head h]",
        text=text,
        picture=heads_diagram(sizes),
        to_try=["Use another --head: the rows outside of its slice are not 0 either."],
        caveat="Only Q, K and V are divided among the heads. A slice of x has no special relation to the "
        "head with the same index.",
        table=table,
    )


def follow_layers(trace: HeadTrace) -> Step:
    """Follow the token through all layers."""
    stream, row = trace.stream, trace.row
    text, table = ["Not all layers of this model could be located."], None
    if stream:
        vectors = [each[row] for each in stream]
        rows = []
        for layer, (before, after) in enumerate(pairwise(vectors)):
            values = trace.layers[layer]
            forward = values.feed_forward
            rows.append(
                (
                    f"layer {layer}",
                    number(norms(before).item()),
                    number(norms(values.output[row]).item()),
                    "-" if forward is None else number(norms(forward[row]).item()),
                    number(cosine(before, after)),
                    number(cosine(vectors[0], after)),
                )
            )
        table = Table(
            ("layer", "|x|", "|attention|", "|feed-forward|", "cosine to x", "cosine to layer 0"), rows
        )
        text = [
            (
                f"The output for “{trace.label(row)}” has the cosine similarity "
                f"{number(cosine(vectors[0], vectors[-1]))} with the embedding that entered layer 0."
            )
        ]
    return Step(
        key="layers",
        title="Through the whole model",
        explanation=(
            "A layer adds the output of attention to x, and then the output of a feed-forward network, which "
            "processes each token on its own. Norms keep the size of the vectors stable, and the residual "
            "connections are a short path for gradients to the first layers. The output of a layer is the "
            "input of the next one, so words can combine into phrases and phrases into sentences."
        ),
        formula="x' = norm(x + attention(x)),  x'' = norm(x' + feed_forward(x'))"
        if not trace.is_pre_norm
        else "x' = x + attention(norm(x)),  x'' = x' + feed_forward(norm(x'))",
        text=text,
        picture=stack_diagram(trace.sizes, is_pre_norm=trace.is_pre_norm),
        to_try=["Follow a special token instead: does its vector change as much?"],
        caveat="Dropout is omitted: it is active only in training. In evaluation it would make results "
        "random, and rows of weights would not sum to 1.",
        table=table,
    )


def compare_contexts(trace: HeadTrace) -> Step:
    """Compare the vectors of a word in different and in similar contexts."""
    contexts = trace.contexts
    (first, other, similar), pairs = contexts.texts, contexts.cosines
    text = [f"“{contexts.word}” in (1) “{first}” is compared with (2) “{other}” and (3) “{similar}”"]
    if pairs:
        text.append(
            f"At the output, texts 1 and 2 have the cosine similarity {number(pairs[-1][0])}, and texts 1 "
            f"and 3, with a similar context, {number(pairs[-1][1])}."
        )
    else:
        text.append("This model has no room for the three texts, or its layers could not be located.")
    labels = [f"layer {layer}" for layer in range(len(pairs) - 1)] + ["output"] * bool(pairs)
    return Step(
        key="contexts",
        title="The same word in two contexts",
        explanation=(
            "In the embedding table, a word has one vector for all its meanings. Attention adds information "
            "from the sentence, so that the vectors of one word in two contexts diverge from layer to layer."
        ),
        formula="cos(x_1, x_2) of the same token at the same position in two texts",
        text=text,
        picture=Bars(
            "cos(1, 3) - cos(1, 2), input of each layer",
            labels or ["-"],
            [same - different for different, same in pairs] or [0.0],
        ),
        to_try=[
            "Use three texts of your own: --contexts TEXT1 TEXT2 TEXT3, which contain the word of --token"
        ],
        caveat="Three sentences show the effect, but do not measure how well the model separates meanings.",
        table=Table(
            ("input of", "texts 1 and 2", "texts 1 and 3"),
            [
                (label, number(different), number(same))
                for label, (different, same) in zip(labels, pairs, strict=True)
            ],
        )
        if pairs
        else None,
    )


def compare_subspaces(trace: HeadTrace) -> Step:
    """Compare the subspaces that W_Q and W_K read with random subspaces."""
    matrices, sizes = trace.head_matrices, trace.sizes
    rows: dict[str, Array] = {}
    if matrices is not None:
        (query, _), (key, _) = matrices
        width = query.shape[-1]
        generator = np.random.default_rng(0)
        rows["this head"] = principal_cosines(query, key)
        rows["random subspaces"] = np.mean(
            [principal_cosines(*generator.normal(size=(2, sizes.hidden, width))) for _ in range(_NUM_RANDOM)],
            axis=0,
        )
    text = [_NO_PROJECTIONS]
    if rows:
        own, chance = (float((each**2).mean()) for each in rows.values())
        text = [
            (
                f"The mean squared cosine of the {width} principal angles is {number(own)}, for random "
                f"subspaces {number(chance)}. It is 1 if both matrices read the same features, and 0 if the "
                "subspaces are orthogonal."
            )
        ]
    shown = rows.get("this head", np.zeros(1))[:8]
    return Step(
        key="subspaces",
        title="The subspaces of queries and keys",
        explanation=(
            "A head reads x only through d_k directions for queries and d_k for keys. If both span the same "
            "subspace, q and k describe the same features of two tokens, which favors similar tokens. The "
            "first principal angle is the smallest between a direction of one subspace and a "
            "direction of the other; the next ones are found in the same way among perpendicular directions. "
            "It is sometimes claimed that subspaces must be orthogonal; the numbers show whether they are."
        ),
        formula="cosines = singular values of U_Qᵀ U_K, with orthonormal bases U of W_Q and W_K",
        text=text,
        picture=Bars(
            "Largest cosines of principal angles of this head",
            [f"angle {index}" for index in range(len(shown))],
            shown.tolist(),
        ),
        to_try=["Compare with a head in layer 0, where x still represents single tokens."],
        caveat="Features of x have different sizes and are correlated, so orthogonal subspaces can still "
        "give large scores.",
        table=Table(
            ("cosine of principal angles", "largest", "median", "smallest"),
            [
                (name, number(each.max()), number(float(np.median(each))), number(each.min()))
                for name, each in rows.items()
            ],
        )
        if rows
        else None,
    )
