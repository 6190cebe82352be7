"""Assembles the steps of a lesson on one attention head."""

from attnlens_analysis.teach.content import Lesson
from attnlens_analysis.teach.inside import (
    add_to_stream,
    enter_layer,
    multiply,
    project,
    scale,
    take_softmax,
    tokenize,
    weigh_values,
)
from attnlens_analysis.teach.meaning import count_heads, measure_quadratic_cost, tie_projections
from attnlens_analysis.teach.values import HeadTrace


def make_lesson(trace: HeadTrace, command: str, npz: str = "head.npz") -> Lesson:
    """Build the lesson for a trace.

    Args:
        trace: Values of the head.
        command: Command line without --layer and --head: `attnlens teach DIR TEXT --token it`.
        npz: Name of the NPZ file that the code examples load.
    """
    full_command = f"{command} --layer {trace.layer} --head {trace.head}"
    steps = [
        tokenize(trace),
        enter_layer(trace),
        project(trace, [f"# {full_command} --npz {npz}", f'd = np.load("{npz}")']),
        multiply(trace),
        scale(trace),
        take_softmax(trace, command),
        weigh_values(trace),
        add_to_stream(trace),
        count_heads(trace),
        tie_projections(trace),
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
                "and K the head size."
            ),
        ],
        steps=steps,
    )
