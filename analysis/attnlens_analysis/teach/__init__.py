"""Lessons that follow one token through one attention head, with the actual values of the model.

`graph` locates queries, keys, values and intermediate results in the attention graph, `values` computes them,
`numbers` contains the arithmetic, and `tokens` handles the text. `parameters` reads weights, and `recurrence`
measures a recurrent layer. `idea`, `inside`, `rows`, `whole` and `meaning` contain the steps, and `diagrams`
the diagrams. `lesson` assembles the steps, and `render` formats them. `walkthrough` builds an interactive
page for all tokens, layers and heads.
"""

from attnlens_analysis.teach.lesson import make_lesson
from attnlens_analysis.teach.values import Contexts, HeadTrace, trace_head
from attnlens_analysis.teach.walkthrough import walkthrough_page

__all__ = ["Contexts", "HeadTrace", "make_lesson", "trace_head", "walkthrough_page"]
