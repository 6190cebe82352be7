"""Viewer pages for the texts of a form, with the same requests, validation and limits as gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.explanations import ExplainMethod, PairMatrix
from attnlens.reductions import AttentionReduction, SqrtUint8
from attnlens.similarity import Similarity
from attnlens_server.bundle import Model, OutputRole
from attnlens_server.core.admission import Budget
from attnlens_server.operations.attention import AttentionQuery, AttentionView, ReducedAttention
from attnlens_server.operations.compare import CompareRequest, Comparison
from attnlens_server.operations.encode import EncodedText, EncodeRequest
from attnlens_server.operations.explain import ExplainRequest, ExplanationTarget
from attnlens_server.operations.explanations import Explanation, TokenScores
from attnlens_server.operations.service import ModelService
from attnlens_server.text import Input, Tokens, TokenSource
from attnlens_viewer import Page
from attnlens_viewer.live import LiveModel
from attnlens_viewer.results import (
    OTHER_TEXT,
    OTHER_TEXT_BY_DOT,
    OWN_EMBEDDING,
    ContrastResult,
    PairResult,
    TextResult,
    build_page,
)

_ATTENTION = (AttentionQuery(view=AttentionView.DENSE, reduction=AttentionReduction(form=SqrtUint8())),)
_SOURCES = {TokenSource.PROMPT: "prompt", TokenSource.TEXT: "text", TokenSource.SPECIAL: "special"}
_ONLY_ATTENTION = (
    "This page shows only attention: the bundle has no contributions graph, or the server was started with "
    "--no-explain."
)


@dataclass(frozen=True, slots=True)
class Form:
    """Texts of a form."""

    text: str
    other: str | None = None
    rather_than: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A token of the page."""

    text: str
    source: str
    char_start: int
    char_end: int
    word_index: int | None
    is_special: bool


@dataclass(frozen=True, slots=True)
class _Scores:
    """Scores of the page."""

    method: str
    values: npt.NDArray[np.float32]
    baseline: float | None
    sum: float
    expected_sum: float | None
    faithfulness: float | None


class Pages:
    """Creates pages of one model."""

    def __init__(self, service: ModelService, model: Model) -> None:
        self._service = service
        self._prompt = model.prompts.get(model.default_prompt_name, "")
        self._other_text = OTHER_TEXT_BY_DOT if model.similarity is Similarity.DOT else OTHER_TEXT
        self._can_explain = ExplainMethod.CONTRIBUTIONS in service.explain.methods
        self._has_matrix = PairMatrix.OUTPUT in service.compare.matrices
        heads = [output.num_heads for output in model.outputs.layers(OutputRole.ATTENTION_WEIGHTS).values()]
        self.model = LiveModel(
            name=model.name,
            num_layers=len(heads),
            num_heads=max(heads, default=0),
            max_tokens=service.model.max_tokens,
            can_explain=self._can_explain,
            labels=() if model.classifier is None else model.classifier.labels,
            takes_pairs=service.model.takes_pairs,
            comparison=model.comparison,
        )

    async def page(self, form: Form, budget: Budget) -> Page:
        """Return the page of one or two texts.

        Raises:
            RequestError: See `attnlens_server.errors`.
            ValueError: A text has too many tokens for a page.
        """
        service = self._service
        texts = [text for text in (form.text, form.other) if text is not None]
        inputs = [Input(text=text) for text in texts]
        request = EncodeRequest(inputs=inputs, attention=_ATTENTION, truncate=False)
        encoded = (await service.encode(request, budget)).texts
        explained: Sequence[Explanation] = ()
        compared: Comparison | None = None
        contrast: ContrastResult | None = None
        if self._can_explain and form.other is None:
            explain = ExplainRequest(inputs=inputs, head_contributions=True, truncate=False)
            explained = (await service.explain(explain, budget)).texts
        elif self._can_explain:
            compared = await self._compare(inputs, budget)
            explained = (compared.a, compared.b)
            contrast = await self._contrast(form, inputs, budget)
        return await service.process.workers.run(self._build, texts, encoded, explained, compared, contrast)

    async def _compare(self, inputs: Sequence[Input], budget: Budget) -> Comparison:
        request = CompareRequest(
            inputs=inputs[:1],
            second_inputs=inputs[1:],
            truncate=False,
            matrix=PairMatrix.OUTPUT if self._has_matrix else None,
            head_contributions=True,
        )
        [pair] = (await self._service.compare(request, budget)).pairs
        return pair

    async def _contrast(self, form: Form, inputs: Sequence[Input], budget: Budget) -> ContrastResult | None:
        if form.other is None or form.rather_than is None:
            return None
        target = ExplanationTarget(contrast=(inputs[1], Input(text=form.rather_than)))
        request = ExplainRequest(inputs=inputs[:1], target=target, truncate=False)
        [text] = (await self._service.explain(request, budget)).texts
        return ContrastResult(form.other, form.rather_than, _scores(text.scores[0]))

    def _build(
        self,
        texts: Sequence[str],
        encoded: Sequence[EncodedText],
        explained: Sequence[Explanation],
        compared: Comparison | None,
        contrast: ContrastResult | None,
    ) -> Page:
        target = OWN_EMBEDDING if compared is None else self._other_text
        explanations: Sequence[Explanation | None] = explained or [None] * len(texts)
        return build_page(
            self.model.name,
            [
                _text_result(text, self._prompt, each, explanation, target)
                for text, each, explanation in zip(texts, encoded, explanations, strict=True)
            ],
            matrix=None
            if compared is None or compared.matrix is None
            else PairResult("output", compared.matrix.values, compared.similarity),
            contrast=contrast,
            notes=() if self._can_explain else (_ONLY_ATTENTION,),
        )


def _text_result(
    text: str, prompt: str, encoded: EncodedText, explained: Explanation | None, target: str
) -> TextResult:
    return TextResult(
        text=text,
        prompt=prompt,
        tokens=_rows(encoded.tokens),
        maps=_maps(encoded),
        scores=() if explained is None else [_scores(scores) for scores in explained.scores],
        target=target,
        head_contributions=None if explained is None else explained.head_contributions,
    )


def _maps(encoded: EncodedText) -> list[npt.NDArray[Any]]:
    """Return the attention maps (H, T, T) of each layer as square roots in uint8."""
    [attention] = encoded.attention
    parts = attention.parts if isinstance(attention, ReducedAttention) else ()
    return [part.data for part in parts if isinstance(part.data, np.ndarray)]


def _rows(tokens: Tokens) -> list[_Row]:
    columns = zip(tokens.texts, tokens.sources, tokens.chars, tokens.words, strict=True)
    return [
        _Row(
            text,
            _SOURCES.get(source, "ids"),
            start,
            end,
            None if source is TokenSource.SPECIAL else word,
            source is TokenSource.SPECIAL,
        )
        for text, source, (start, end), word in columns
    ]


def _scores(scores: TokenScores) -> _Scores:
    return _Scores(
        scores.method.name.lower(),
        scores.values,
        scores.baseline,
        scores.sum,
        scores.expected_sum,
        scores.faithfulness,
    )
