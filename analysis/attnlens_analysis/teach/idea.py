"""Lesson steps on the idea of attention: its purpose, its three roles, and the shapes of its tensors."""

from attnlens_analysis.teach.content import Bars, Step, Table, number
from attnlens_analysis.teach.diagrams import head_diagram
from attnlens_analysis.teach.values import HeadTrace
from attnlens_analysis.timing import METHOD


def motivate(trace: HeadTrace) -> Step:
    """Compare attention with a recurrent layer of the same width."""
    length, hidden = len(trace.sentence), trace.values.entering.shape[-1]
    distance = abs(trace.target - trace.row)
    direction = "" if trace.target <= trace.row else "that reads from right to left "
    products = 4 * length * hidden**2 + 2 * length**2 * hidden
    text = [
        (
            f"From “{trace.label(trace.target)}” to “{trace.label(trace.row)}”, a recurrent layer "
            f"{direction}takes {distance} {'step' if distance == 1 else 'steps'}, attention 1. For all "
            f"{length} tokens, a recurrent layer takes {length} steps one after another, attention 1."
        ),
        (
            f"Attention is not less work: it needs {products:,} multiplications (4 T D² + 2 T² D), and a "
            f"simple recurrent layer {2 * length * hidden**2:,} (2 T D²)."
        ),
    ]
    table = None
    if trace.races:
        text.append(f"Measured in NumPy on this CPU, with D = {hidden}. {METHOD}")
        text.append(
            "With few cores, the loop is often faster: it "
            "multiplies less, and attention also needs T² D products. Attention gains on parallel hardware: "
            "a GPU computes thousands of positions at once, but cannot shorten the loop."
        )
        table = Table(
            ("tokens", "attention, ms", "recurrent loop, ms", "loop / attention"),
            [(f"{n:,}", f"{a:.2f}", f"{loop:.2f}", f"{loop / a:.2f}") for n, a, loop in trace.races],
        )
    return Step(
        key="why",
        title="Why attention",
        explanation=(
            "A recurrent network reads one token after another and passes on a single state. Information "
            "from a distant token must survive every step in between, and no step can start before the "
            "previous one ends. Attention reads any token in one step, and computes all positions in "
            "parallel."
        ),
        formula="recurrent: h_t = tanh(W h_(t-1) + U x_t)   attention: y_t = sum over j of a_tj v_j",
        text=text,
        picture=Bars(
            f"Recurrent steps from each token to “{trace.label(trace.row)}”",
            trace.sentence.labels,
            [float(abs(index - trace.row)) for index in range(length)],
            [trace.target],
            decimals=0,
        ),
        to_try=["Put a longer clause between the two words: the number of recurrent steps grows."],
        caveat="This layer is not trained, and its times say nothing about its quality. Recurrent layers "
        "need no T² weights, so they remain an option for very long texts.",
        table=table,
    )


def assign_roles(trace: HeadTrace) -> Step:
    """Explain query, key and value by the library analogy, with their directions in this head."""
    values, head, row, target = trace.values, trace.head, trace.row, trace.target
    token, other = trace.label(row), trace.label(target)
    scores = values.query[head] @ values.key[head].T
    text = [
        (
            f"q·k is {number(scores[row, target])} if “{token}” seeks “{other}”, and "
            f"{number(scores[target, row])} in the other direction. If queries and keys had the same matrix "
            "and bias, the two numbers would be equal."
        )
    ]
    return Step(
        key="roles",
        title="Query, key and value: a search in a library",
        explanation=(
            "In a library, the query is your question, the key is the label on the spine of a book, and the "
            "value is its content: you compare the question with the labels, and read the content. Here "
            "every token has all three: a query, a key and a value. Unlike in a library, the result is a "
            "weighted mixture of all books. In self-attention, queries, keys and values come from the same "
            "sequence. In cross-attention, as in a translation model, queries come from one sequence, and "
            "keys and values from another. Q, K and V have one row per token; Kᵀ, the transpose of K, has "
            "one column per token, so Q Kᵀ has one number per pair."
        ),
        formula="attention(Q, K, V) = softmax(Q Kᵀ / sqrt(d_k)) V",
        text=text,
        picture=head_diagram(trace.sizes),
        to_try=["Use --token with the other word: does it attend back?"],
        caveat="The analogy ends at the label: keys are trained vectors and have no names.",
    )


def list_shapes(trace: HeadTrace) -> Step:
    """List the shape of each tensor, and count the parameters of the layer."""
    values, sizes = trace.values, trace.sizes
    length, hidden, heads, width = sizes.tokens, sizes.hidden, sizes.heads, sizes.head
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        ("x", "[T, D]", (length, hidden)),
        ("W_Q, W_K, W_V per head", "[D, d_k]", (hidden, width)),
        ("Q, K, V per head", "[T, d_k]", (length, width)),
        ("scores per head", "[T, T]", (length, length)),
        ("weights per head", "[T, T]", (length, length)),
        ("context per head", "[T, d_k]", values.context.shape[1:]),
        ("concatenation", "[T, H d_k]", (length, heads * values.context.shape[-1])),
        ("W_O", "[H d_k, D]", (heads * values.context.shape[-1], hidden)),
        ("output", "[T, D]", values.output.shape),
    ]
    elements = [rows * columns for _, _, (rows, columns) in shapes]
    counts = {kind: count for kind, count in trace.parameters.counts.items() if count}
    listed = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    text = [
        (
            f"All {heads} heads together have scores of shape [H, T, T] = [{heads}, {length}, {length}]; a "
            "batch of B texts adds a first axis: [B, H, T, T]. Here, "
            f"d_k = {width} and D / H = {hidden / heads:g}."
        )
    ]
    if trace.overlap:
        own = width - 2 * trace.overlap
        text.append(
            f"Heads overlap: of the d_k = {width} columns of W_Q of a head, {own} are its own and "
            f"{trace.overlap} belong to each adjacent head. All heads together have {heads * own} columns, "
            "and the first and last head have zeros in place of a missing neighbor."
        )
    if listed:
        text.append(f"Parameters of this layer: {listed}; {sum(counts.values()):,} in total.")
    return Step(
        key="shapes",
        title="The shapes of all tensors",
        explanation=(
            "D is fixed by the model, T by the text. Usually d_k = D / H, which keeps the cost independent "
            "of the number of heads. d_k can be any number, since W_O maps H d_k features to D. No parameter "
            "has an axis of size T, so the same parameters process any length up to the number of positions."
        ),
        formula="[T, D] -> [T, d_k] -> [T, T] -> [T, d_k] -> [T, H d_k] -> [T, D]",
        text=text,
        picture=Bars("Number of elements", [name for name, _, _ in shapes], elements, decimals=0),
        to_try=["Use a text twice as long: which tensors have twice the elements, and which four times?"],
        caveat="The softmax is taken over the last axis of the scores, the keys. A softmax over the queries "
        "raises no error, since the shape [T, T] is the same, but columns instead of rows sum to 1: queries "
        "compete for each key.",
        table=Table(
            ("tensor", "shape", "in this model"),
            [(name, shape, f"[{', '.join(map(str, actual))}]") for name, shape, actual in shapes],
        ),
    )
