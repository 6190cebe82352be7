"""What an explanation takes, known before the model runs: memory, and bytes of its message.

Letters: T tokens of a text, D hidden size, E components of an embedding.
"""

from dataclasses import dataclass

from attnlens_server.serving.explanations.checks import RECEIVED_ATTENTION, ROLLOUT, ExplanationPlan
from attnlens_server.serving.sizes import TEXT_MEMORY_BYTES, TOKEN_MEMORY_BYTES, ReplyCosts
from attnlens_server.text import Tokens

_TOKEN_ID_BYTES = 16  # of a token that waits: its id and its type
_FLOAT, _DOUBLE = 4, 8
_SCORES_BYTES = 64  # of a method in a message beside its values


@dataclass(frozen=True, slots=True)
class ExplanationCosts:
    """Measures texts of one model.

    Attributes:
        reply: what replies take.
        hidden_size: D.
        max_dimensions: the components that an embedding may have.
        heads: L x H.
        num_layers: L.
    """

    reply: ReplyCosts
    hidden_size: int
    max_dimensions: int
    heads: int
    num_layers: int

    def message_bytes(self, tokens: Tokens, plan: ExplanationPlan) -> int:
        """Return the bytes of a text in a message, or a little more."""
        count = len(tokens.ids)
        scores = len(plan.methods) * (_FLOAT * count + _SCORES_BYTES)
        words = 5 * count
        heads = _FLOAT * self.heads if plan.head_contributions else 0
        return self.reply.text_bytes + self.reply.tokens_bytes(tokens) + scores + words + heads

    def matrix_bytes(self, num_tokens: tuple[int, int], plan: ExplanationPlan) -> int:
        """Return the bytes of the matrix of a pair in a message."""
        rows, columns = num_tokens
        if plan.needs_input_matrix:
            return _FLOAT * (rows + 1) * (columns + 1) + 2 * _SCORES_BYTES
        return 0 if plan.matrix is None else _FLOAT * rows * columns

    def sweep_bytes(self, num_tokens: tuple[int, int], plan: ExplanationPlan) -> int:
        """Return what an input matrix takes in memory while it is made: (T + 1, E) twice."""
        return 2 * _DOUBLE * (min(num_tokens) + 1) * plan.dimensions if plan.needs_input_matrix else 0

    def memory_bytes(self, tokens: Tokens, plan: ExplanationPlan) -> int:
        """Return what a text takes in memory until its scores are there."""
        count = len(tokens.ids)
        size = TEXT_MEMORY_BYTES + count * (_TOKEN_ID_BYTES + TOKEN_MEMORY_BYTES)
        size += _DOUBLE * (2 * self.max_dimensions + 2 * self.heads) + len(plan.methods) * _DOUBLE * count
        if plan.needs_token_vectors:
            size += (_FLOAT + _DOUBLE) * count * self.hidden_size
        if plan.needs_masked_runs:
            size += count * (_DOUBLE * 2 * plan.dimensions + _FLOAT * count)
        if ROLLOUT in plan.methods:
            size += _FLOAT * self.num_layers * count**2
        elif RECEIVED_ATTENTION in plan.methods:
            size += _FLOAT * count**2
        return size
