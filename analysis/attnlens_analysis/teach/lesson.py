"""The lesson on one question: what is computed in a head, step by step, and what follows from it."""

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
from attnlens_analysis.teach.values import Question


def make_lesson(question: Question, command: str, npz: str = "head.npz") -> Lesson:
    """Put the steps together.

    Args:
        question: with its values.
        command: that asks it, without --layer and --head: `attnlens teach DIR TEXT --token it`.
        npz: the name of the file of `--npz` that the code under "try" loads.
    """
    asked = f"{command} --layer {question.layer} --head {question.head}"
    steps = [
        tokenize(question),
        enter_layer(question),
        project(question, [f"# {asked} --npz {npz}", f'd = np.load("{npz}")']),
        multiply(question),
        scale(question),
        take_softmax(question, command),
        weigh_values(question),
        add_to_stream(question),
        count_heads(question),
        tie_projections(question),
    ]
    if question.costs:
        steps.append(measure_quadratic_cost(question))
    token, place = question.label(question.row), f"layer {question.layer}, head {question.head}"
    return Lesson(
        title=f"How “{token}” attends in {place} of {question.model_name}",
        introduction=[
            f"Text: {question.sentence.text!r}",
            (
                "Every number below is computed by this model for this text. Layers, heads, tokens and rows "
                "count from 0. T is the number of tokens, D the width of a token's vector, H the number of "
                "heads, K the width of a head."
            ),
        ],
        steps=steps,
    )
