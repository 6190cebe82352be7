"""One token through one head, with the model's own numbers.

`graph` finds q, k, v and the rest in the bundle's attention graph, `values` has them computed, `numbers` is
the arithmetic, `tokens` the text, and `lesson` puts the steps together for `render`.
"""

from attnlens_analysis.teach.lesson import make_lesson
from attnlens_analysis.teach.values import Question, ask

__all__ = ["Question", "ask", "make_lesson"]
