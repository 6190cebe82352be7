"""Lesson steps inside a layer, from tokens to the output of attention."""

import numpy as np

from attnlens_analysis.teach.content import Bars, Grid, Step, Table, number, numbers
from attnlens_analysis.teach.numbers import Array, cosine, joined, norms, sharpness
from attnlens_analysis.teach.values import HeadTrace

_MAX_ROWS = 12
_NUM_SHOWN = 4
# A token has a negligible value if its weight is large, but its share of the output is several times smaller.
_NEGLIGIBLE_RATIO = 4.0
_LARGE_WEIGHT = 0.02


def tokenize(trace: HeadTrace) -> Step:
    """Show the tokens of the text."""
    sentence = trace.sentence
    words = sentence.written_words()
    pieces = [f"{label} ({count})" for label, count in words if count > 1]
    split = f"Words with several tokens: {', '.join(pieces)}." if pieces else "Each word is one token."
    listed = ", ".join(f"{row} {label}" for row, label in enumerate(sentence.labels))
    return Step(
        key="tokens",
        title="The text is split into tokens",
        explanation=(
            "A model does not read words. Its tokenizer splits the text into tokens from a fixed "
            "vocabulary and usually adds special tokens at both ends. All further steps work on tokens."
        ),
        formula="text -> T tokens, each an index into the vocabulary",
        text=[
            f"{len(sentence)} tokens: {listed}",
            split + " Attention operates on tokens, not on words.",
        ],
        picture=Bars(
            "Tokens per word",
            [label for label, _ in words],
            [float(count) for _, count in words],
            decimals=0,
        ),
        to_try=[
            (
                "Add a long word such as “antidisestablishmentarianism” to the text and count its tokens. "
                "For weights between words, sum over the tokens of the attended word and average over the "
                "tokens of the attending word."
            )
        ],
        caveat="Special tokens such as [CLS] and [SEP] also receive attention, often more than other tokens.",
    )


def enter_layer(trace: HeadTrace) -> Step:
    """Show the input vector of the layer."""
    values, row = trace.values, trace.row
    vector = values.entering[row]
    return Step(
        key="input",
        title=f"Each token has a vector at layer {trace.layer}",
        explanation=(
            "Each token is represented by a vector. In layer 0, the vector encodes the token and, in "
            "most models, its position. Attention ignores order, and the rest of a layer processes each "
            "token alone, so without positions a permuted text would give permuted outputs. Each layer adds "
            "information from other tokens."
        ),
        formula="x: T vectors of size D, the rows of a matrix [T, D]",
        text=[
            (
                f"x of “{trace.label(row)}” has D = {len(vector)} components, starting with "
                f"{numbers(vector[:_NUM_SHOWN])}. Its norm |x| is {number(norms(vector).item())}."
            ),
        ],
        picture=Bars("|x| of each token", trace.sentence.labels, norms(values.entering).tolist(), [row]),
        to_try=[
            "Use --layer 0: there, x is the embedding of the token and its position."
            if trace.layer
            else "Replace another word: x, the embedding of this token and its position, does not change."
        ],
        caveat=f"x no longer represents this token alone: {trace.layer} layers mixed in other tokens."
        if trace.layer
        else "",
    )


def project(trace: HeadTrace, loading: list[str]) -> Step:
    """Show query, key and value. `loading` is the code that loads them."""
    values, row, head, target = trace.values, trace.row, trace.head, trace.target
    query, key = values.query[head, row], values.key[head, target]
    products = query * key
    order = np.argsort(-np.abs(products))[:8]
    rotated = " q and k are shown after rotary embeddings." if values.is_rotated else ""
    return Step(
        key="projections",
        title="Query, key and value",
        explanation=(
            "A head multiplies each token's vector by three trained matrices. The query describes the "
            "information that the token seeks, the key describes the token to the queries of others, and the "
            "value is the information that it passes on when it is attended to. All tokens share the three "
            "matrices, so the number of parameters does not depend on the length. nn.Linear of PyTorch "
            "stores each W transposed."
        ),
        formula="q = x W_Q + b_Q,  k = x W_K + b_K,  v = x W_V + b_V   (d_k components per head)",
        text=[
            (
                f"q of “{trace.label(row)}” starts with {numbers(query[:_NUM_SHOWN])}, |q| is "
                f"{number(norms(query).item())}; d_k = {len(query)}.{rotated}"
            ),
            (
                f"k of “{trace.label(target)}” starts with {numbers(key[:_NUM_SHOWN])}, |k| is "
                f"{number(norms(key).item())}. v of “{trace.label(target)}”: |v| is "
                f"{number(norms(values.value[head, target]).item())}."
            ),
            f"q·k is the sum of d_k terms q_i k_i. The chart shows the {len(order)} largest in magnitude.",
        ],
        picture=Bars(
            f"Terms q_i k_i of “{trace.label(row)}” and “{trace.label(target)}”",
            [f"i = {index}" for index in order],
            products[order].tolist(),
        ),
        to_try=[
            "Compute the products:",
            "import numpy as np",
            *loading,
            f'd["q"][{row}] @ d["k"].T  # the next step',
        ],
    )


def multiply(trace: HeadTrace) -> Step:
    """Show the products of the query with all keys."""
    values, row, head = trace.values, trace.row, trace.head
    products = values.query[head, row] @ values.key[head].T
    return Step(
        key="scores",
        title="The query is multiplied by each key",
        explanation=(
            "The dot product q·k is large if the key points in the direction of the query. A head "
            "relates two tokens by this number alone; scaled, it becomes the score of the key."
        ),
        formula="q·k_j = sum over i of q_i k_ji   for each token j",
        text=[f"Largest and smallest: {_extremes(trace, products)}."],
        picture=_bars(trace, "q·k", products),
        to_try=["Double q (2 * q): every product doubles. How does the softmax change?"],
        caveat="A product can be large because of a large key norm, not because the key matches the query.",
    )


def describe_inactive(trace: HeadTrace) -> str:
    """Return a sentence that the head is not used for the token, or nothing."""
    gates = trace.values.gates
    if gates is None or gates[trace.row, trace.head] != 0:
        return ""
    return (
        f" Head {trace.head} is inactive for “{trace.label(trace.row)}”: its gate is 0, so its weights are "
        "computed, but its context is multiplied by 0."
    )


def scale(trace: HeadTrace) -> Step:
    """Show the purpose of the scale by comparing weights with and without it."""
    values, row, head = trace.values, trace.row, trace.head
    scaled, unscaled = values.weights[head, row], values.weights_without_scale[head, row]
    row_scaled, row_unscaled = sharpness(scaled), sharpness(unscaled)
    layers = trace.layers.values()
    all_scaled = sharpness(joined(each.weights for each in layers))
    all_unscaled = sharpness(joined(each.weights_without_scale for each in layers))
    num_heads = sum(len(each.weights) for each in layers)
    factor = f"{values.scale:.6g}"
    other = "without a scale" if values.other_scale == 1 else f"with {values.other_scale:.6g}"
    bias = " + bias_j" if values.has_biases else ""
    columns = ("this row", f"this row, {other}", f"mean of {num_heads} heads", f"mean, {other}")
    rows = [
        (
            name,
            *(number(getattr(each, field)) for each in (row_scaled, row_unscaled, all_scaled, all_unscaled)),
        )
        for name, field in (
            ("entropy, nats", "entropy"),
            ("largest weight", "largest"),
            ("trace of the Jacobian", "trace"),
        )
    ]
    text = _describe_scale(trace, row_scaled.trace, row_unscaled.trace, other)
    return Step(
        key="scale",
        title="The products are scaled",
        explanation=(
            "A sum of d_k independent terms with mean 0 and variance (mean square) 1 has variance d_k, so "
            "products grow with the head size. Without a scale, the softmax saturates: one weight approaches "
            "1, all derivatives approach 0, and training cannot correct the head. The entropy of a row, "
            "-sum a ln(a), is 0 if one token has all weight, and largest for equal weights."
        ),
        formula=f"s_j = scale · q·k_j{bias},  usually scale = 1 / sqrt(d_k)",
        text=text,
        picture=Grid(
            f"The weights of “{trace.label(row)}” with the model's scale and {other}",
            (f"scale {factor}", other),
            trace.sentence.labels,
            (scaled.tolist(), unscaled.tolist()),
        ),
        to_try=[
            "Use another scale, or 1 for none, with d from the step “Query, key and value”:",
            f's = 1 * d["q"][{row}] @ d["k"].T{_bias_code(trace)}',
            "a = np.exp(s - s.max()); a / a.sum()",
        ],
        caveat="The comparison changes the scale of a trained model. A model trained this way would differ.",
        table=Table(("measure", *columns), rows),
    )


def _describe_scale(trace: HeadTrace, slope: float, other_slope: float, other: str) -> list[str]:
    """Return sentences on the scores, the trace of the Jacobian with and without the scale, and W_Q."""
    values, row, head = trace.values, trace.row, trace.head
    factor = f"{values.scale:.6g}"
    text = [
        (
            f"This model's scale is {factor}{_root(values.scale, values.query.shape[-1])}. Scores: "
            f"{_extremes(trace, values.scores[head, row])}."
        ),
        (
            "The Jacobian of the softmax contains the derivatives of all weights with respect to all scores. "
            f"Its trace, the sum of its diagonal a_j (1 - a_j), is {number(slope)}, and {other} "
            f"{number(other_slope)}. With respect to q·k, it is multiplied by the scale: "
            f"{number(values.scale * slope)} and {number(values.other_scale * other_slope)}. At 0, no "
            "gradient reaches q and k."
        ),
    ]
    absorbed = values.weights_with(scale=1.0, query=values.scale * values.query)
    text.append(
        "The scale does not change the order of the scores or the functions that the model can express: with "
        f"W_Q and b_Q multiplied by {factor} instead, weights differ by at most "
        f"{number(float(np.abs(absorbed - values.weights_with()).max()))}."
    )
    if values.has_biases:
        term = "A position bias" if trace.mechanism == "softmax" else f"A term of {trace.mechanism} attention"
        text.insert(1, f"{term} is added: {_extremes(trace, values.biases[head, row])}.")
        if trace.mechanism == "composed":
            text.insert(
                1, f"Before the composition of heads: {_extremes(trace, values.products[head, row])}."
            )
    return text


def take_softmax(trace: HeadTrace, command: str) -> Step:
    """Show the attention weights."""
    weights = trace.values.weights[trace.head, trace.row]
    return Step(
        key="softmax",
        title="The softmax turns scores into weights",
        explanation=(
            "The softmax is applied to each row, over the keys. exp makes every score positive, and dividing "
            "by the sum makes the weights of a query sum to 1. These are the attention weights that a "
            "server returns. Their entropy is measured in nats, the unit of natural logarithms."
        ),
        formula="a_j = exp(s_j) / sum over m of exp(s_m)",
        text=[
            (
                f"Largest: {_largest(trace, weights)}. The {int((weights > 0).sum())} weights sum to "
                f"{number(weights.sum())}; their entropy is {sharpness(weights).entropy:.6f} nats, with "
                f"a maximum of {number(np.log(len(weights)))}.{describe_inactive(trace)}"
            ),
        ],
        picture=_bars(trace, "Weights a_j", weights),
        to_try=[
            "Show another head:",
            f"{command} --layer {trace.layer} --head {(trace.head + 1) % len(trace.values.weights)}",
        ],
        caveat="Weights always sum to 1, even if no token is relevant to the head. Then most weight is often "
        "on [CLS], [SEP] or a period.",
    )


def weigh_values(trace: HeadTrace) -> Step:
    """Show that weights must be interpreted together with the values."""
    values, row, head = trace.values, trace.row, trace.head
    weights, lengths = values.applied[head, row], norms(values.value[head])
    magnitudes = np.abs(weights) * lengths  # composed weights can be negative
    shares = magnitudes / magnitudes.sum()
    order = np.argsort(-weights)[:_MAX_ROWS]
    before, is_composed = values.weights[head, row], values.composed is not None
    columns = ("before composition", "composed a_j") if is_composed else ("weight a_j",)
    table = Table(
        ("token j", *columns, "|v_j|", "a_j |v_j|", "share"),
        [
            (
                trace.label(j),
                *([number(before[j])] if is_composed else []),
                *(number(each[j]) for each in (weights, lengths, magnitudes, shares)),
            )
            for j in order
        ],
    )
    negligible = [
        j for j in order if weights[j] > _LARGE_WEIGHT and weights[j] > _NEGLIGIBLE_RATIO * shares[j]
    ]
    remarks = "".join(
        f" “{trace.label(j)}” has the weight {number(weights[j])}, but its |v| is {lengths[j]:.2f} and its "
        f"share {number(shares[j])}: a large weight on a small value has little effect."
        for j in negligible
    )
    return Step(
        key="values",
        title="The values are averaged by weight",
        explanation=(
            "The output of the head, its context, is the sum of all values, each multiplied by its weight. "
            "Weights alone can be misleading: a large weight on a small value changes little."
        ),
        formula="context = sum over j of a_j v_j   (d_k components)",
        text=[
            (
                f"Token j contributes a_j |v_j|. The share of {trace.label(trace.target)} is "
                f"{number(shares[trace.target])}.{remarks}"
            ),
            f"|context| is {number(norms(values.context[head, row]).item())}.{describe_inactive(trace)}",
            *(_describe_composition(trace) if is_composed else []),
        ],
        picture=Grid(
            f"The weights of “{trace.label(row)}” before and after the composition of heads",
            ("before", "after"),
            trace.sentence.labels,
            (before.tolist(), weights.tolist()),
        )
        if is_composed
        else _bars(trace, "Shares of a_j |v_j|", shares),
        to_try=[
            "Compute the context and its norm:",
            f'c = d["{"composed" if is_composed else "weights"}"][{row}] @ d["v"]; np.linalg.norm(c)',
        ],
        caveat="|v_j| is measured before the output projection, and vectors can cancel each other, so these "
        "shares are only approximate.",
        table=table,
    )


def _describe_composition(trace: HeadTrace) -> list[str]:
    """Return sentences on the weights before and after composition."""
    values, row, head = trace.values, trace.row, trace.head
    before, after = values.weights[head, row], values.applied[head, row]
    largest = int(np.abs(after - before).argmax())
    return [
        (
            "Composition replaces the weights of this head by a combination of the weights of all heads for "
            "the same pair of tokens. The largest change is "
            f"{number(before[largest])} to {number(after[largest])}, for “{trace.label(largest)}”. Composed "
            f"weights need not sum to 1 (here {number(after.sum())}) and can be negative."
        )
    ]


def add_to_stream(trace: HeadTrace) -> Step:
    """Compare the output of the head with other heads and the residual."""
    values, row = trace.values, trace.row
    output, residual = values.output[row], values.residual[row]
    num_heads, width = values.context.shape[0], values.context.shape[2]
    text = [
        (
            f"{num_heads} heads x {width} = {num_heads * width} components are multiplied by W_O. |output| "
            f"is {number(norms(output).item())}; the vector that it is added to has the norm "
            f"{number(norms(residual).item())}."
        )
    ]
    if values.gates is not None:
        text.append(
            f"Each context is first multiplied by the gate of its head.{describe_inactive(trace)} "
            "The graph computes inactive heads as well."
        )
    if trace.leaving_is_next:
        after = number(cosine(residual, trace.leaving[row]))
        text.append(
            f"The cosine similarity of the vectors before and after the layer, with feed-forward, is {after}."
        )
    return Step(
        key="output",
        title="The heads are concatenated and added to the vector",
        explanation=(
            "The contexts of all heads are concatenated. The output projection W_O mixes the heads and "
            "returns to the size of x. A residual connection adds the result to the vector that entered the "
            "layer, so attention modifies the vector instead of replacing it."
        ),
        formula="output = [context_0, …, context_(H-1)] W_O + b_O,  then x + output",
        text=text,
        picture=Bars(
            "|context| of each head" if values.gates is None else "gate · |context| of each head",
            [f"head {head}" for head in range(num_heads)],
            norms(values.gated_context[:, row]).tolist(),
            [trace.head],
        ),
        to_try=["Compare with the last layer (--layer -1): does the vector change more there?"],
        caveat=f"This is one of {num_heads} heads, and the residual connection bypasses all of them.",
        table=None if values.gates is None else _gate_table(trace, values.gates[row]),
    )


def _gate_table(trace: HeadTrace, gates: Array) -> Table:
    """Return the gate of each head for the token, with the lengths of contexts before and after it."""
    lengths = (norms(each[:, trace.row]) for each in (trace.values.context, trace.values.gated_context))
    rows = zip(gates, *lengths, strict=True)
    return Table(
        ("head", "gate", "|context|", "gate · |context|"),
        [
            (f"head {head}{'' if row[0] else ', inactive'}", *(number(each) for each in row))
            for head, row in enumerate(rows)
        ],
    )


def _bias_code(trace: HeadTrace) -> str:
    """Return the code that adds the bias of the row, if the model has any."""
    values = trace.values
    return f' + d["bias"][{trace.row}]' if values.has_biases or not values.allowed.all() else ""


def _root(factor: float, width: int) -> str:
    return f" = 1 / sqrt({width})" if np.isclose(factor, width**-0.5) else ""


def _bars(trace: HeadTrace, title: str, values: Array) -> Bars:
    marked = [trace.target]
    return Bars(f"{title} of “{trace.label(trace.row)}”", trace.sentence.labels, values.tolist(), marked)


def _largest(trace: HeadTrace, values: Array, count: int = 5) -> str:
    return ", ".join(f"{trace.label(j)} {number(values[j])}" for j in np.argsort(-values)[:count])


def _extremes(trace: HeadTrace, values: Array) -> str:
    allowed = trace.values.allowed[trace.head, trace.row]
    order = [j for j in np.argsort(-values) if allowed[j]]
    largest, last = _largest(trace, np.where(allowed, values, -np.inf)), order[-1]
    return f"{largest}, … {trace.label(last)} {number(values[last])}"
