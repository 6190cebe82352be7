"""Conversion of Explain and Compare replies. Sums of scores are checked.

Shapes: T tokens, U tokens or words.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from attnlens.similarity import Similarity
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import explanation_pb2
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.core.replies import (
    Consistency,
    Reply,
    check_count,
    check_finite,
    check_presence,
    checked_array,
    checked_usage,
    invalid_reply,
    invalid_text,
    precision_of,
    tokens_of,
)
from attnlens_client.core.requests import name_of
from attnlens_client.explanations import Comparison, Explanation, TokenScores
from attnlens_client.results import Array

FLOAT32 = DataType.DATA_TYPE_FLOAT32
# Methods whose scores and baseline add up to the target, and methods with undefined scores.
_COMPLETE = frozenset({"contributions", "output_share"})
_WITH_GAPS = frozenset({"leave_one_out"})
_CONTRIBUTIONS = explanation_pb2.EXPLAIN_METHOD_CONTRIBUTIONS
# Maximum difference between the sum of scores and baseline and the target d . p / |p|, relative to |d|. The
# export has the same limit (GATE_KIND_MAX_INCOMPLETENESS).
_GRAPH_ERROR = 1e-5
# Rounding error relative to the sum of magnitudes. Each score went through all layers in fp32, with an error
# of a few units of 6e-8. 5e-7 was measured for MiniLM on whole passages.
_ROUNDING = 1e-6
# Of sums by source. Tokens cancel within a source, so the sums do not show how large the rounding errors are.
_SUMS_TOLERANCE = 1e-4
# For output and input matrices, whose elements come from many runs.
_MATRIX_TOLERANCE, _TARGET_TOLERANCE = 1e-4, 1e-3


class ExplanationReader:
    """Reads all replies of one `explain` or `compare`.

    Args:
        model: Requested model name, or "".
        inputs: Texts of all calls. For a comparison, its two texts.
        methods: Requested methods.
        has_words: Whether scores are per word.
        has_heads: Whether contributions of heads were requested.
        may_truncate: Whether texts may be truncated.
        direction_length: Norm of the direction, or its maximum.
    """

    def __init__(
        self,
        model: str,
        inputs: Sequence[pb.Input] | Mapping[int, pb.Input],
        methods: Sequence[str],
        *,
        has_words: bool,
        has_heads: bool,
        may_truncate: bool,
        direction_length: float = 1.0,
    ) -> None:
        self._inputs = inputs
        self._consistency = Consistency(model=model)
        self._methods = tuple(methods)
        self._has_words = has_words
        self._has_heads = has_heads
        self._may_truncate = may_truncate
        self._direction_length = direction_length

    def texts(self, replies: Iterable[Reply[pb.ExplainResponse]]) -> list[Explanation]:
        """Concatenate the explanations of all calls.

        Raises:
            BadReplyError: A reply is invalid or inconsistent.
        """
        texts: list[Explanation] = []
        for first, count, response in replies:
            where = f"texts[{first}:{first + count}]"
            self._consistency.check_model(response.model, response.model_version, where)
            self._consistency.check_computation(response.computation, where)
            check_count(len(response.results), count, f"results for {where}")
            texts += [
                self._text(index, result, response) for index, result in enumerate(response.results, first)
            ]
        return texts

    def comparison(self, response: pb.CompareResponse, matrix: int) -> Comparison:
        """Return the comparison of the only pair. Errors call its texts `texts[0]` and `texts[1]`.

        Raises:
            BadReplyError: The reply is invalid.
        """
        self._consistency.check_model(response.model, response.model_version, "the pair")
        check_count(len(response.results), 1, "results for the pair")
        [result] = response.results
        a, b = (self._text(index, side, response) for index, side in enumerate((result.a, result.b)))
        targets = (result.similarity, a.target_value, b.target_value)
        function = _function(response)
        tolerance = _TARGET_TOLERANCE * (abs(result.similarity) + 1)
        is_possible = function is Similarity.DOT or abs(result.similarity) <= 1 + _TARGET_TOLERANCE
        if not (is_possible and np.ptp(targets) <= tolerance):
            raise invalid_reply(
                f"the similarity is {targets[0]}, but the target values of the two texts are {targets[1:]}"
            )
        values = self._matrix(result, (a, b), matrix)
        baselines = _baselines(result, (a, b), matrix, values)
        return Comparison(a, b, result.similarity, values, *baselines, function=function.name.lower())

    def _matrix(
        self, result: pb.Comparison, sides: tuple[Explanation, Explanation], kind: int
    ) -> Array | None:
        check_presence("matrix", 0, is_present=result.HasField("matrix"), is_requested=bool(kind))
        if not kind:
            return None
        rows, columns = (len(side.units) for side in sides)
        matrix = checked_array(result.matrix, FLOAT32, (rows, columns), "matrix")
        if kind == explanation_pb2.PAIR_MATRIX_OUTPUT:
            check_finite(matrix, "a matrix", 0)
            tolerance = _TARGET_TOLERANCE * (1 + float(np.abs(matrix).sum()))
            _check_sum(matrix, result.similarity, tolerance, 0, "the matrix")
        return matrix

    def of_score(self, index: int, message: pb.Explanation, response: pb.ScoreResponse) -> Explanation:
        """Return the explanation of the document with this index.

        Raises:
            BadReplyError: The explanation is invalid.
        """
        return replace(self._text(index, message, response), precision="fp32")

    def _text(
        self,
        index: int,
        message: pb.Explanation,
        response: pb.ExplainResponse | pb.CompareResponse | pb.ScoreResponse,
    ) -> Explanation:
        usage = checked_usage(message.usage, index, may_truncate=self._may_truncate)
        tokens = tokens_of(message.tokens, index, self._inputs[index])
        if len(tokens) != usage.num_tokens:
            raise invalid_text(index, f"has {len(tokens)} tokens, expected {usage.num_tokens}")
        words = self._words(index, message.unit_ids, len(tokens))
        if not math.isfinite(message.target_value):
            raise invalid_text(index, f"has the target value {message.target_value}")
        methods = tuple(
            name_of(explanation_pb2.ExplainMethod.DESCRIPTOR, each.method) for each in message.scores
        )
        if methods != self._methods:
            raise invalid_text(
                index, f"has the methods {', '.join(methods)}, expected {', '.join(self._methods)}"
            )
        count = max(words) + 1 if words else len(tokens)
        keeps_length = message.HasField("sums_by_source") or _function(response) is Similarity.DOT
        return Explanation(
            tokens,
            usage,
            words,
            message.target_value,
            tuple(
                self._scores(index, scores, method, count, message, keeps_length=keeps_length)
                for method, scores in zip(methods, message.scores, strict=True)
            ),
            self._heads(index, message),
            response.model,
            response.model_version,
            response.computation.engine,
            precision_of(response.computation),
            _sums_by_source(index, message),
        )

    def _words(self, index: int, words: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Return the word indices, which must be numbered in order of appearance."""
        if not self._has_words:
            check_presence("words", index, is_present=bool(words), is_requested=False)
            return ()
        if len(words) != num_tokens:
            raise invalid_text(index, f"has {len(words)} word indices for {num_tokens} tokens")
        last = -1
        for word in words:
            if not 0 <= word <= last + 1:
                raise invalid_text(index, f"has the word index {word} after {last}, out of order")
            last = max(last, word)
        return tuple(words)

    def _scores(
        self,
        index: int,
        message: pb.TokenScores,
        method: str,
        count: int,
        explanation: pb.Explanation,
        *,
        keeps_length: bool,
    ) -> TokenScores:
        target_value = explanation.target_value
        values = checked_array(message.values, FLOAT32, (count,), f"{method} of texts[{index}]")
        baseline = message.baseline if message.HasField("baseline") else None
        expected_sum = message.expected_sum if message.HasField("expected_sum") else None
        if method in _WITH_GAPS:
            if np.isinf(values).any():
                raise invalid_text(index, f"has an infinity in {method}")
        else:
            check_finite(values, method, index)
        is_complete = method in _COMPLETE
        check_presence(
            f"baseline of {method}", index, is_present=baseline is not None, is_requested=is_complete
        )
        parts = np.append(values[np.isfinite(values)].astype(np.float64), baseline or 0.0)
        size = float(np.abs(parts).sum())
        _check_sum(parts, message.sum, _ROUNDING * size, index, method)
        if is_complete and (
            expected_sum is None or abs(expected_sum - target_value) > _ROUNDING * abs(target_value)
        ):
            raise invalid_text(
                index,
                f"has {method} with the expected sum {expected_sum}, but the target value {target_value}",
            )
        if expected_sum is not None:
            length = abs(target_value) + size if keeps_length else self._direction_length
            tolerance = _GRAPH_ERROR * length + _ROUNDING * size
            _check_sum(parts, expected_sum, tolerance, index, method)
        faithfulness = message.faithfulness if message.HasField("faithfulness") else None
        if faithfulness is not None and not abs(faithfulness) <= 1:
            raise invalid_text(index, f"has {method} with the rank correlation {faithfulness}")
        return TokenScores(method, values, baseline, message.sum, expected_sum, faithfulness)

    def _heads(self, index: int, message: pb.Explanation) -> Array | None:
        has = message.HasField("head_contributions")
        check_presence("contributions of heads", index, is_present=has, is_requested=self._has_heads)
        if not has:
            return None
        heads = checked_array(message.head_contributions, FLOAT32, (None, None), "contributions of heads")
        check_finite(heads, "contributions of heads", index)
        self._consistency.check("layers and heads", heads.shape, f"texts[{index}]")
        return heads


def _function(response: pb.ExplainResponse | pb.CompareResponse | pb.ScoreResponse) -> Similarity:
    """Return the function that compares embeddings. Older servers only know the cosine.

    Raises:
        BadReplyError: The function is unknown.
    """
    number = response.similarity if isinstance(response, pb.CompareResponse) else Similarity.COSINE
    try:
        return Similarity(number or Similarity.COSINE)
    except ValueError:
        raise invalid_reply(f"the similarity function {number} is unknown") from None


def _sums_by_source(index: int, message: pb.Explanation) -> dict[str, float] | None:
    """Return the sums by source, named like `Token.source`, which add up to the sum of the contributions."""
    if not message.HasField("sums_by_source"):
        return None
    sums = message.sums_by_source
    found = {
        "text": sums.text,
        "second_text": sums.second_text,
        "prompt": sums.prompt,
        "special": sums.special_tokens,
        "ids": sums.token_ids,
        "baseline": sums.baseline,
    }
    totals = [scores.sum for scores in message.scores if scores.method == _CONTRIBUTIONS]
    if not (totals and all(map(math.isfinite, found.values()))):
        raise invalid_text(index, f"has the sums by source {found}, and no contributions or infinite sums")
    size = sum(map(abs, found.values()))
    _check_sum(np.array([*found.values()]), totals[0], _SUMS_TOLERANCE * (1 + size), index, "sums by source")
    return found


def _baselines(
    result: pb.Comparison, sides: tuple[Explanation, Explanation], kind: int, matrix: Array | None
) -> tuple[Array | None, Array | None, float | None]:
    """Return the baselines of an input matrix. Together with its elements, they add up to the similarity."""
    is_input = kind == explanation_pb2.PAIR_MATRIX_INPUT
    for field in ("baseline_row", "baseline_column", "baseline"):
        check_presence(f"{field} of the matrix", 0, is_present=result.HasField(field), is_requested=is_input)
    if not is_input or matrix is None:
        return None, None, None
    rows, columns = (len(side.units) for side in sides)
    row = checked_array(result.baseline_row, FLOAT32, (columns,), "baseline_row")
    column = checked_array(result.baseline_column, FLOAT32, (rows,), "baseline_column")
    parts = np.concatenate([matrix.ravel(), row, column, [result.baseline]], dtype=np.float64)
    check_finite(parts, "a matrix or its baselines", 0)
    tolerance = _MATRIX_TOLERANCE * (1 + float(np.abs(parts).sum()))
    _check_sum(parts, result.similarity, tolerance, 0, "the matrix with its baselines")
    return row, column, result.baseline


def _check_sum(parts: Array, expected: float, tolerance: float, index: int, name: str) -> None:
    total = float(parts.sum(dtype=np.float64))
    if not abs(total - expected) <= tolerance:
        raise invalid_text(index, f"has {name} with the sum {total}, expected {expected}")
