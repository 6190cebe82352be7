"""What the tokens of a text did for its embedding, or of two texts for their similarity.

`jobs` is what may be asked, `checks` makes plans of it, `runs` runs the graphs, `input_matrix` runs one of
them many times for a pair, `scores` makes numbers of what they return, `costs` says what that takes,
`service` is the way of a job, `results` is what comes of it.
"""

from attnlens_server.serving.explanations.checks import ExplanationChecks
from attnlens_server.serving.explanations.jobs import CompareJob, ExplainJob
from attnlens_server.serving.explanations.service import ExplanationService

__all__ = ["CompareJob", "ExplainJob", "ExplanationChecks", "ExplanationService"]
