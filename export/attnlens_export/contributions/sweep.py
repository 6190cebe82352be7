"""The sweep: from a gradient at the end of a graph back to the embeddings of tokens.

Each node that makes a linear value hands its gradient to its linear inputs, as `transposes` says for its
operator. What is added on the way and does not depend on the embeddings, the biases, goes to the baseline,
which is therefore computed by itself, and not as the rest: that scores and baseline add up is a test of every
step.

    base := sum of g . bias            at each sum
    g    := W g, A' g, g * ratio ...   at each product
    at the end: score of token j = g[j] . embedded[j]

B batch, T tokens, D width.
"""

from attnlens_export.contributions.state import SweepState
from attnlens_export.contributions.transposes import TRANSPOSES
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import BATCH_AXIS, EMBEDDED


def sweep(state: SweepState, value: str, gradient: str) -> tuple[str, str]:
    """Sweep back from a linear value with its gradient, of the same shape.

    Returns:
        The names of the scores (B, T) and of the baseline (B,).

    Raises:
        GraphError: something on the way is not linear, and no rule says what to take as it is.
    """
    writer = state.writer
    if not state.flow(value).is_linear:
        raise GraphError(f"no contributions: {value} is not linear in the embeddings of tokens")
    state.give(value, gradient)
    for node in reversed(list(writer.graph.node)):
        (result,) = node.output[:1]
        if result not in state.gradients or result == EMBEDDED:
            continue
        if node.op_type not in TRANSPOSES:
            raise GraphError(
                f"no contributions: the operator {node.op_type} of {node.name!r} lies between the embeddings "
                "of tokens and the embedding of the text, and there is no rule to go back through it"
            )
        TRANSPOSES[node.op_type](state, node, state.gradient(result))
    if EMBEDDED not in state.gradients:
        raise GraphError("no contributions: the graph does not lead from the embeddings of tokens")
    product = writer.add("Mul", state.gradient(EMBEDDED), EMBEDDED, shape=writer.shape(EMBEDDED))
    return writer.sum(product, [2]), _total(state)


def _total(state: SweepState) -> str:
    """Return the sum of all terms of the baseline: (B,)."""
    writer = state.writer
    if not state.baseline:
        zeros = writer.add("Mul", EMBEDDED, writer.constant(0.0), shape=writer.shape(EMBEDDED))
        return writer.sum(zeros, [1, 2])
    total, *others = state.baseline
    for other in others:
        total = writer.add("Add", total, other, shape=(BATCH_AXIS, 1))
    return writer.add("Squeeze", total, writer.constant([1]), shape=(BATCH_AXIS,))
