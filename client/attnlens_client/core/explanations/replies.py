"""Replies: from messages to explanations, once they are known to be what was asked for, and to add up.

What is wrong is a BadReplyError. T tokens of a text, U tokens or words of it.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import explanation_pb2
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.core.checks import (
    Agreed,
    check_count,
    check_finite,
    check_presence,
    checked_array,
    checked_usage,
    precision_of,
    wrong_reply,
    wrong_text,
)
from attnlens_client.core.enums import name_of
from attnlens_client.core.replies import Reply, tokens_of
from attnlens_client.explanations import Comparison, Explanation, TokenScores
from attnlens_client.results import Array

FLOAT32 = DataType.DATA_TYPE_FLOAT32
# Those whose scores and baseline add up to the target, and those that may lack a number.
_COMPLETE = frozenset({"contributions", "output_share"})
_WITH_GAPS = frozenset({"leave_one_out"})
# Largest distance of scores and baseline from the target d . p / |p|, as a share of |d|: the limit of an
# export (GATE_KIND_MAX_INCOMPLETENESS).
_GRAPH_ERROR = 1e-5
# Rounding, as a share of the sum of magnitudes. Each part went through all layers in fp32, so its own error
# is a few units of 6e-8; 5e-7 was measured for MiniLM on whole passages.
_ROUNDING = 1e-6
# Of an output or input matrix, whose elements come from many runs.
_MATRIX_TOLERANCE, _TARGET_TOLERANCE = 1e-4, 1e-3


class ExplanationReader:
    """Reads all replies of one `explain` or `compare`.

    Args:
        model: that was asked for; empty: any.
        inputs: Texts of all calls; of a comparison, both of its texts.
        methods: that were asked for.
        has_words: whether scores are about words.
        has_heads: whether what heads contribute was asked for.
        may_truncate: whether texts may be cut.
        direction_length: |d|, or the largest that it can be.
    """

    def __init__(
        self,
        model: str,
        inputs: Sequence[pb.Input],
        methods: Sequence[str],
        *,
        has_words: bool,
        has_heads: bool,
        may_truncate: bool,
        direction_length: float = 1.0,
    ) -> None:
        self._inputs = inputs
        self._agreed = Agreed(model=model)
        self._methods = tuple(methods)
        self._has_words = has_words
        self._has_heads = has_heads
        self._may_truncate = may_truncate
        self._direction_length = direction_length

    def texts(self, replies: Iterable[Reply[pb.ExplainResponse]]) -> list[Explanation]:
        """Join the explanations of several calls.

        Raises:
            BadReplyError: a reply is not what was asked for, or they don't fit together.
        """
        texts: list[Explanation] = []
        for first, count, response in replies:
            where = f"texts[{first}:{first + count}]"
            self._agreed.check_model(response.model, response.model_version, where)
            self._agreed.check_computation(response.computation, where)
            check_count(len(response.results), count, f"results for {where}")
            texts += [
                self._text(index, result, response) for index, result in enumerate(response.results, first)
            ]
        return texts

    def comparison(self, response: pb.CompareResponse, matrix: int) -> Comparison:
        """Read the comparison of the only pair: its texts are number 0 and 1 in what is raised.

        Raises:
            BadReplyError: as `texts`.
        """
        self._agreed.check_model(response.model, response.model_version, "the pair")
        check_count(len(response.results), 1, "results for the pair")
        [result] = response.results
        a, b = (self._text(index, side, response) for index, side in enumerate((result.a, result.b)))
        values = (result.similarity, a.target_value, b.target_value)
        if not (abs(result.similarity) <= 1 + _TARGET_TOLERANCE and np.ptp(values) <= _TARGET_TOLERANCE):
            raise wrong_reply(
                f"the similarity is {values[0]}, and the targets of the two texts are {values[1:]}"
            )
        found = self._matrix(result, (a, b), matrix)
        return Comparison(a, b, result.similarity, found, *_baselines(result, (a, b), matrix, found))

    def _matrix(
        self, result: pb.Comparison, sides: tuple[Explanation, Explanation], kind: int
    ) -> Array | None:
        check_presence("a matrix", 0, has=result.HasField("matrix"), wants=bool(kind))
        if not kind:
            return None
        rows, columns = (len(side.units) for side in sides)
        found = checked_array(result.matrix, FLOAT32, (rows, columns), "elements of the matrix")
        if kind == explanation_pb2.PAIR_MATRIX_OUTPUT:
            check_finite(found, "a matrix", 0)
            allowed = _TARGET_TOLERANCE * (1 + float(np.abs(found).sum()))
            _check_sum(found, result.similarity, allowed, 0, "the matrix")
        return found

    def _text(
        self, index: int, message: pb.Explanation, response: pb.ExplainResponse | pb.CompareResponse
    ) -> Explanation:
        usage = checked_usage(message.usage, index, may_truncate=self._may_truncate)
        tokens = tokens_of(message.tokens, index, self._inputs[index])
        if len(tokens) != usage.num_tokens:
            raise wrong_text(index, f"has {len(tokens)} instead of {usage.num_tokens} tokens")
        words = self._words(index, message.unit_ids, len(tokens))
        if not math.isfinite(message.target_value):
            raise wrong_text(index, f"has the target {message.target_value}")
        methods = tuple(
            name_of(explanation_pb2.ExplainMethod.DESCRIPTOR, each.method) for each in message.scores
        )
        if methods != self._methods:
            raise wrong_text(
                index, f"is explained by {', '.join(methods)} instead of {', '.join(self._methods)}"
            )
        count = max(words) + 1 if words else len(tokens)
        return Explanation(
            tokens,
            usage,
            words,
            message.target_value,
            tuple(
                self._scores(index, scores, method, count, message.target_value)
                for method, scores in zip(methods, message.scores, strict=True)
            ),
            self._heads(index, message),
            response.model,
            response.model_version,
            response.computation.engine,
            precision_of(response.computation),
        )

    def _words(self, index: int, words: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Read the numbers of words: they begin in order, and none is left out."""
        if not self._has_words:
            check_presence("words", index, has=bool(words), wants=False)
            return ()
        if len(words) != num_tokens:
            raise wrong_text(index, f"has words for {len(words)} instead of {num_tokens} tokens")
        most = -1
        for word in words:
            if not 0 <= word <= most + 1:
                raise wrong_text(index, f"has the word {word} after {most}, out of order")
            most = max(most, word)
        return tuple(words)

    def _scores(
        self, index: int, message: pb.TokenScores, method: str, count: int, target_value: float
    ) -> TokenScores:
        what = f"{method} of texts[{index}]"
        values = checked_array(message.values, FLOAT32, (count,), what)
        baseline = message.baseline if message.HasField("baseline") else None
        expected_sum = message.expected_sum if message.HasField("expected_sum") else None
        if method in _WITH_GAPS:
            if np.isinf(values).any():
                raise wrong_text(index, f"has an infinity in {method}")
        else:
            check_finite(values, method, index)
        is_complete = method in _COMPLETE
        check_presence(f"a baseline of {method}", index, has=baseline is not None, wants=is_complete)
        parts = np.append(values[np.isfinite(values)].astype(np.float64), baseline or 0.0)
        size = float(np.abs(parts).sum())
        _check_sum(parts, message.sum, _ROUNDING * size, index, method)
        if is_complete and (
            expected_sum is None or abs(expected_sum - target_value) > _ROUNDING * abs(target_value)
        ):
            raise wrong_text(index, f"has {method} of {expected_sum}, and the target is {target_value}")
        if expected_sum is not None:
            allowed = _GRAPH_ERROR * self._direction_length + _ROUNDING * size
            _check_sum(parts, expected_sum, allowed, index, method)
        measured = message.faithfulness if message.HasField("faithfulness") else None
        if measured is not None and not abs(measured) <= 1:
            raise wrong_text(index, f"has {method} with the rank correlation {measured}")
        return TokenScores(method, values, baseline, message.sum, expected_sum, measured)

    def _heads(self, index: int, message: pb.Explanation) -> Array | None:
        has = message.HasField("head_contributions")
        check_presence("contributions of heads", index, has=has, wants=self._has_heads)
        if not has:
            return None
        heads = checked_array(message.head_contributions, FLOAT32, (None, None), "contributions of heads")
        check_finite(heads, "contributions of heads", index)
        self._agreed.check("layers and heads", heads.shape, f"texts[{index}]")
        return heads


def _baselines(
    result: pb.Comparison, sides: tuple[Explanation, Explanation], kind: int, matrix: Array | None
) -> tuple[Array | None, Array | None, float | None]:
    """Read what an input matrix has beside its elements: all of it adds up to the similarity."""
    is_input = kind == explanation_pb2.PAIR_MATRIX_INPUT
    for field in ("baseline_row", "baseline_column", "baseline"):
        check_presence(f"a {field} of the matrix", 0, has=result.HasField(field), wants=is_input)
    if not is_input or matrix is None:
        return None, None, None
    rows, columns = (len(side.units) for side in sides)
    row = checked_array(result.baseline_row, FLOAT32, (columns,), "elements of baseline_row")
    column = checked_array(result.baseline_column, FLOAT32, (rows,), "elements of baseline_column")
    parts = np.concatenate([matrix.ravel(), row, column, [result.baseline]], dtype=np.float64)
    check_finite(parts, "a matrix or its baselines", 0)
    allowed = _MATRIX_TOLERANCE * (1 + float(np.abs(parts).sum()))
    _check_sum(parts, result.similarity, allowed, 0, "the matrix with its baselines")
    return row, column, result.baseline


def _check_sum(parts: Array, expected: float, allowed: float, index: int, what: str) -> None:
    """Check that numbers add up to `expected`, within `allowed`."""
    total = float(parts.sum(dtype=np.float64))
    if not abs(total - expected) <= allowed:
        raise wrong_text(index, f"has {what} that adds up to {total} instead of {expected}")
