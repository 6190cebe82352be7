"""Assembles the steps of a lesson on one attention head."""

from attnlens_analysis.teach.content import Lesson, number
from attnlens_analysis.teach.graph import DIFFERENCES
from attnlens_analysis.teach.idea import assign_roles, list_shapes, motivate
from attnlens_analysis.teach.inside import (
    add_to_stream,
    describe_inactive,
    enter_layer,
    multiply,
    project,
    scale,
    take_softmax,
    tokenize,
    weigh_values,
)
from attnlens_analysis.teach.meaning import count_heads, measure_quadratic_cost, tie_projections
from attnlens_analysis.teach.numbers import softmax
from attnlens_analysis.teach.rows import apply_masks, vary_temperature
from attnlens_analysis.teach.values import HeadTrace
from attnlens_analysis.teach.whole import (
    compare_contexts,
    compare_subspaces,
    follow_layers,
    project_all_features,
)

_ROUNDING = 1e-5


def make_lesson(trace: HeadTrace, command: str, npz: str = "head.npz") -> Lesson:
    """Build the lesson for a trace.

    Args:
        trace: Values of the head.
        command: Command line without --layer and --head: `attnlens teach DIR TEXT --token it`.
        npz: Name of the NPZ file that the code examples load.
    """
    full_command = f"{command} --layer {trace.layer} --head {trace.head}"
    steps = [
        motivate(trace),
        assign_roles(trace),
        tokenize(trace),
        enter_layer(trace),
        project(trace, [f"# {full_command} --npz {npz}", f'd = np.load("{npz}")']),
        multiply(trace),
        scale(trace),
        take_softmax(trace, command),
        vary_temperature(trace),
        apply_masks(trace),
        weigh_values(trace),
        list_shapes(trace),
        project_all_features(trace),
        add_to_stream(trace),
        follow_layers(trace),
        compare_contexts(trace),
        count_heads(trace),
        tie_projections(trace),
        compare_subspaces(trace),
    ]
    if trace.costs:
        steps.append(measure_quadratic_cost(trace))
    token, head = trace.label(trace.row), f"layer {trace.layer}, head {trace.head}"
    return Lesson(
        title=f"How “{token}” attends in {head} of {trace.model_name}",
        introduction=[
            f"Text: {trace.sentence.text!r}",
            (
                "All numbers are computed by this model for this text. Layers, heads, tokens and rows are "
                "counted from 0. T is the number of tokens, D the hidden size, H the number of heads, "
                "and d_k the head size. x has one row per token, so projections are written x W."
            ),
            *_difference(trace),
        ],
        steps=steps,
    )


def _difference(trace: HeadTrace) -> list[str]:
    """Return a paragraph on the mechanism of the layer, unless it is a softmax of q.k."""
    if trace.mechanism == "softmax":
        return []
    values = trace.values
    plain = softmax(values.products, values.allowed)
    difference = DIFFERENCES.get(trace.mechanism, "weights are not computed by a softmax of q·k alone")
    largest = float(abs(plain - values.weights).max())
    agreement = "The softmax of the scaled q·k reproduces them."
    if largest > _ROUNDING:
        agreement = (
            f"The softmax of the scaled q·k alone differs from them by up to {number(largest)}. The "
            "logarithm of the ratio of the two is shown as a bias b of the scores, since exp(s + b) is "
            "exp(s) exp(b)."
        )
    return [
        (
            f"Layer {trace.layer} has {trace.mechanism} attention: {difference}. The weights come from "
            f"the graph. {agreement}{_describe_gates(trace)}"
        )
    ]


def _describe_gates(trace: HeadTrace) -> str:
    """Return sentences on the gates of the token, if its heads have gates."""
    gates = trace.values.gates
    if gates is None:
        return ""
    listed = ", ".join(f"head {head} {number(gate)}" for head, gate in enumerate(gates[trace.row]))
    return (
        f" Gates of “{trace.label(trace.row)}”: {listed}. A head with the gate 0 is inactive for this token.\
{describe_inactive(trace)}"
    )
