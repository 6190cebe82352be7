"""The steps inside of a layer: from tokens to what the layer adds to a token's vector."""

import numpy as np

from attnlens_analysis.teach.content import Bars, Grid, Step, Table, number, numbers
from attnlens_analysis.teach.numbers import Array, cosine, joined, norms, sharpness
from attnlens_analysis.teach.values import Question

# More rows than that are not read.
_MAX_ROWS = 12
_NUM_FIRST = 4
# A share of the weights, against the same share of what they bring, that shows an empty value.
_EMPTY = 4.0
_LARGE = 0.02


def tokenize(question: Question) -> Step:
    """Say what the text's tokens are."""
    sentence = question.sentence
    words = sentence.written_words()
    pieces = [f"{label} ({count})" for label, count in words if count > 1]
    split = f"Of several pieces: {', '.join(pieces)}." if pieces else "Each word of this text is one piece."
    listed = ", ".join(f"{row} {label}" for row, label in enumerate(sentence.labels))
    return Step(
        title="The text becomes tokens",
        formula="text -> T tokens, each a number of the vocabulary",
        text=[
            f"{len(sentence)} tokens: {listed}",
            split + " The model attends from piece to piece and knows of no words.",
        ],
        picture=Bars(
            "Pieces of each word",
            [label for label, _ in words],
            [float(count) for _, count in words],
            decimals=0,
        ),
        to_try=[
            (
                "Put a long word such as “antidisestablishmentarianism” into the text and count its "
                "pieces. To read weights by the word, sum over the pieces attended to and take the mean "
                "over those attending."
            )
        ],
        caveat="Special tokens such as [CLS] and [SEP] are attended to like all others, often the most.",
    )


def enter_layer(question: Question) -> Step:
    """Show the vector that the layer reads."""
    values, row = question.values, question.row
    vector = values.entering[row]
    return Step(
        title=f"A vector enters layer {question.layer}",
        formula="x: T vectors of D numbers",
        text=[
            (
                f"x of “{question.label(row)}” has D = {len(vector)} numbers; the first are "
                f"{numbers(vector[:_NUM_FIRST])}. Its length |x| is {number(norms(vector).item())}."
            ),
        ],
        picture=Bars("|x| of each token", question.sentence.labels, norms(values.entering).tolist(), [row]),
        to_try=[
            "Ask for --layer 0: there x is the embedding of the token and of its position alone."
            if question.layer
            else "Replace another word: x, the embedding of this token and its position, stays the same."
        ],
        caveat=f"This is no longer the token alone: {question.layer} layers have mixed others into it."
        if question.layer
        else "",
    )


def project(question: Question, loading: list[str]) -> Step:
    """Show query, key and value; `loading` is the code that loads them."""
    values, row, head, to = question.values, question.row, question.head, question.target
    query, key = values.query[head, row], values.key[head, to]
    products = query * key
    order = np.argsort(-np.abs(products))[:8]
    rotated = " q and k are shown after their rotation by position." if values.is_rotated else ""
    return Step(
        title="Query, key and value",
        formula="q = W_q x + b_q,  k = W_k x + b_k,  v = W_v x + b_v   (K numbers for each head)",
        text=[
            (
                f"q of “{question.label(row)}” begins {numbers(query[:_NUM_FIRST])}, |q| is "
                f"{number(norms(query).item())}; K = {len(query)}.{rotated}"
            ),
            (
                f"k of “{question.label(to)}” begins {numbers(key[:_NUM_FIRST])}, |k| is "
                f"{number(norms(key).item())}. v of “{question.label(to)}”: |v| is "
                f"{number(norms(values.value[head, to]).item())}."
            ),
            f"The product q·k sums K terms, q_i k_i; the picture has the {len(order)} largest in magnitude.",
        ],
        picture=Bars(
            f"Terms q_i k_i of “{question.label(row)}” and “{question.label(to)}”",
            [f"i = {place}" for place in order],
            products[order].tolist(),
        ),
        to_try=[
            "Take the numbers and multiply them yourself:",
            "import numpy as np",
            *loading,
            f'd["q"][{row}] @ d["k"].T  # the next step',
        ],
    )


def multiply(question: Question) -> Step:
    """Show the products of the query and all keys."""
    values, row, head = question.values, question.row, question.head
    products = values.query[head, row] @ values.key[head].T
    return Step(
        title="Each key is compared with the query",
        formula="q·k_j = sum over i of q_i k_ji   for each token j",
        text=[f"Largest and smallest: {_extremes(question, products)}."],
        picture=_bars(question, "q·k", products),
        to_try=["Make q twice as long (2 * q): every product doubles. What does the softmax make of it?"],
        caveat="A product is large for long keys too, not only for those that point as the query does.",
    )


def scale(question: Question) -> Step:
    """Show what the scale is there for: weights with it and without."""
    values, row, head = question.values, question.row, question.head
    with_it, without = values.weights[head, row], values.weights_without_scale[head, row]
    here, there = sharpness(with_it), sharpness(without)
    layers = question.layers.values()
    all_with = sharpness(joined(each.weights for each in layers))
    all_without = sharpness(joined(each.weights_without_scale for each in layers))
    num_heads = sum(len(each.weights) for each in layers)
    factor = f"{values.scale:.6g}"
    other = "without a scale" if values.other_scale == 1 else f"with {values.other_scale:.6g}"
    bias = " + bias_j" if values.has_biases else ""
    columns = ("this row", f"this row, {other}", f"all {num_heads} heads", f"all, {other}")
    rows = [
        (name, *(number(getattr(each, field)) for each in (here, there, all_with, all_without)))
        for name, field in (
            ("entropy, nats", "entropy"),
            ("largest weight", "largest"),
            ("trace of the Jacobian", "trace"),
        )
    ]
    text = [
        (
            f"This model's scale is {factor}{_root(values.scale, values.query.shape[-1])}. Scores: "
            f"{_extremes(question, values.scores[head, row])}."
        ),
        (
            "The trace of the softmax's Jacobian, sum a (1 - a), is what is left to learn from: at "
            f"0, no gradient reaches q and k. Here it is {number(here.trace)}, {other} {number(there.trace)}."
        ),
    ]
    if values.has_biases:
        text.insert(1, f"A bias by distance is added: {_extremes(question, values.biases[head, row])}.")
    return Step(
        title="The products are scaled",
        formula=f"s_j = scale · q·k_j{bias},  usually scale = 1 / sqrt(K)",
        text=text,
        picture=Grid(
            f"The weights of “{question.label(row)}” with the model's scale and {other}",
            (f"scale {factor}", other),
            question.sentence.labels,
            (with_it.tolist(), without.tolist()),
        ),
        to_try=[
            "Take another scale, 1 for none, with d from above:",
            f's = 1 * d["q"][{row}] @ d["k"].T{_code_of_biases(question)}',
            "a = np.exp(s - s.max()); a / a.sum()",
        ],
        caveat="The other column is this model with its scale changed, not one that was trained so.",
        table=Table(("mean over rows", *columns), rows),
    )


def take_softmax(question: Question, command: str) -> Step:
    """Show the weights."""
    weights = question.values.weights[question.head, question.row]
    return Step(
        title="The softmax makes weights of scores",
        formula="a_j = exp(s_j) / sum over m of exp(s_m)",
        text=[
            (
                f"Largest: {_largest(question, weights)}. The {int((weights > 0).sum())} weights sum to "
                f"{number(weights.sum())}; their entropy is {sharpness(weights).entropy:.6f} nats of "
                f"{number(np.log(len(weights)))} at most."
            ),
        ],
        picture=_bars(question, "Weights a_j", weights),
        to_try=[
            "Take another head:",
            f"{command} --layer {question.layer} --head {(question.head + 1) % len(question.values.weights)}",
        ],
        caveat="Weights always sum to 1, even where a head has nothing to look for: then they go somewhere "
        "harmless, often to [CLS], [SEP] or a full stop.",
    )


def weigh_values(question: Question) -> Step:
    """Show that weights say little without the values they are multiplied with."""
    values, row, head = question.values, question.row, question.head
    weights, lengths = values.weights[head, row], norms(values.value[head])
    brought = weights * lengths
    shares = brought / brought.sum()
    order = np.argsort(-weights)[:_MAX_ROWS]
    table = Table(
        ("token j", "weight a_j", "|v_j|", "a_j |v_j|", "share"),
        [
            (question.label(j), number(weights[j]), number(lengths[j]), number(brought[j]), number(shares[j]))
            for j in order
        ],
    )
    empty = [j for j in order if weights[j] > _LARGE and weights[j] > _EMPTY * shares[j]]
    found = "".join(
        f" “{question.label(j)}” gets the weight {number(weights[j])}, but its |v| is "
        f"{lengths[j]:.2f}, and its "
        f"share of what is brought {number(shares[j])}: a large weight on an empty value does nothing."
        for j in empty
    )
    return Step(
        title="The weights mix the values",
        formula="context = sum over j of a_j v_j   (K numbers)",
        text=[
            (
                f"Tokens bring a_j |v_j|; {question.label(question.target)} brings the share "
                f"{number(shares[question.target])}.{found}"
            ),
            f"|context| is {number(norms(values.context[head, row]).item())}.",
        ],
        picture=_bars(question, "Shares of a_j |v_j|", shares),
        to_try=[
            "Compute the context and its length:",
            f'c = d["weights"][{row}] @ d["v"]; np.linalg.norm(c)',
        ],
        caveat="|v_j| is the length in this head, before the output projection, and vectors may cancel each "
        "other: shares of lengths are a rough account too.",
        table=table,
    )


def add_to_stream(question: Question) -> Step:
    """Show what the head's result is worth beside the others and the residual."""
    values, row = question.values, question.row
    output, residual = values.output[row], values.residual[row]
    num_heads, width = values.context.shape[0], values.context.shape[2]
    text = [
        (
            f"{num_heads} heads x {width} = {num_heads * width} numbers go through W_o. |output| is "
            f"{number(norms(output).item())} beside |x| = {number(norms(residual).item())} of the "
            "residual that it is added to."
        )
    ]
    if question.leaving_is_next:
        after = number(cosine(residual, question.leaving[row]))
        text.append(
            f"The cosine of the vector before the layer and after it, feed-forward included, is {after}."
        )
    return Step(
        title="Heads are joined and added to the vector",
        formula="x + W_o [context_1; …; context_H] + b_o",
        text=text,
        picture=Bars(
            "|context| of each head",
            [f"head {head}" for head in range(num_heads)],
            norms(values.context[:, row]).tolist(),
            [question.head],
        ),
        to_try=["Compare with the last layer (--layer -1): is the vector turned more there?"],
        caveat=f"One head is 1 of {num_heads} here, and the residual goes round all of them.",
    )


def _code_of_biases(question: Question) -> str:
    """Return what the code of a row adds to products, where the model adds something."""
    values = question.values
    return f' + d["bias"][{question.row}]' if values.has_biases or not values.allowed.all() else ""


def _root(factor: float, width: int) -> str:
    return f" = 1 / sqrt({width})" if np.isclose(factor, width**-0.5) else ""


def _bars(question: Question, title: str, values: Array) -> Bars:
    marked = [question.target]
    return Bars(
        f"{title} of “{question.label(question.row)}”", question.sentence.labels, values.tolist(), marked
    )


def _largest(question: Question, values: Array, count: int = 5) -> str:
    return ", ".join(f"{question.label(j)} {number(values[j])}" for j in np.argsort(-values)[:count])


def _extremes(question: Question, values: Array) -> str:
    allowed = question.values.allowed[question.head, question.row]
    order = [j for j in np.argsort(-values) if allowed[j]]
    largest, last = _largest(question, np.where(allowed, values, -np.inf)), order[-1]
    return f"{largest}, … {question.label(last)} {number(values[last])}"
