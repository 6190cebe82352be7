"""Backward sweep from the gradient of the result to the token embeddings.

The gradient of each linear value is propagated to the linear inputs of its node by the rules in `transposes`.
Summands that do not depend on the embeddings (biases) are added to the baseline. The baseline is thus
computed independently of the scores, so their sum verifies every step.

    at each sum:     baseline += g . bias
    at each product: g = W g, A' g, g * ratio, ...
    at the end:      score of token j = g[j] . embedded[j]

B batch, T tokens.
"""

from attnlens_export.contributions.state import SweepState
from attnlens_export.contributions.transposes import TRANSPOSES
from attnlens_export.errors import GraphError
from attnlens_export.graph.names import BATCH_AXIS, EMBEDDED


def sweep(state: SweepState, value: str, gradient: str) -> tuple[str, str]:
    """Propagate the gradient of a linear value to the token embeddings.

    Returns:
        Names of the scores (B, T) and the baseline (B,).

    Raises:
        GraphError: An operator on the path has no rule.
    """
    writer = state.writer
    if not state.flow(value).is_linear:
        raise GraphError(f"no contributions: {value} is not linear in the token embeddings")
    state.add_gradient(value, gradient)
    for node in reversed(list(writer.graph.node)):
        (result,) = node.output[:1]
        if result not in state.gradients or result == EMBEDDED:
            continue
        if node.op_type not in TRANSPOSES:
            raise GraphError(
                f"no contributions: there is no rule for the operator {node.op_type} of {node.name!r}, which "
                "is between the token embeddings and the embedding of the text"
            )
        TRANSPOSES[node.op_type](state, node, state.gradient(result))
    if EMBEDDED not in state.gradients:
        raise GraphError("no contributions: the result does not depend on the token embeddings")
    product = writer.add("Mul", state.gradient(EMBEDDED), EMBEDDED, shape=writer.shape(EMBEDDED))
    return writer.sum(product, [2]), _total(state)


def _total(state: SweepState) -> str:
    """Return the sum of the terms of the baseline: (B,)."""
    writer = state.writer
    if not state.baseline:
        zeros = writer.add("Mul", EMBEDDED, writer.constant(0.0), shape=writer.shape(EMBEDDED))
        return writer.sum(zeros, [1, 2])
    total, *others = state.baseline
    for other in others:
        total = writer.add("Add", total, other, shape=(BATCH_AXIS, 1))
    return writer.add("Squeeze", total, writer.constant([1]), shape=(BATCH_AXIS,))
