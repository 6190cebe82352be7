"""Viewer pages from results of the client. Not imported by `import attnlens_client`."""
# ruff: noqa: D417 - several arguments share a description

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnlens_client.arguments import AttentionQuery, ExplainMethodName, PairMatrixName
from attnlens_client.client import BlockingMethods
from attnlens_client.explanations import Comparison, Explanation
from attnlens_client.model_info import ModelInfo
from attnlens_client.results import EncodedText
from attnlens_viewer import Page
from attnlens_viewer.results import (
    OTHER_TEXT,
    OTHER_TEXT_BY_DOT,
    OWN_EMBEDDING,
    ContrastResult,
    PairResult,
    TextResult,
    build_page,
)

CONTRIBUTIONS: ExplainMethodName = "contributions"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Prompts and truncation of one or two texts.

    Attributes:
        prompt_names: Prompt name of each text, or None.
        prompts: Prompt of each text, or None. If both are None, the model's default prompt is used.
        truncate: Whether to truncate long texts.
    """

    prompt_names: tuple[str | None, str | None] = (None, None)
    prompts: tuple[str | None, str | None] = (None, None)
    truncate: bool = False


def view_page(
    client: BlockingMethods,
    text: str,
    other: str | None = None,
    *,
    rather_than: str | None = None,
    matrix: PairMatrixName = "output",
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate: bool = False,
    model: str = "",
) -> Page:
    """Request attention and contributions of one or two texts and return a page.

    Args:
        client: Client.
        text: Text to show.
        other: Second text, for a comparison.
        rather_than: Third text. The page explains why `text` is closer to `other` than to it.
        matrix: Matrix of token pairs of the two texts.
        prompt_name, prompt, truncate, model: See `Client.embed`. Prompts apply to all texts.

    Raises:
        ValueError: `rather_than` is set without `other`, or a text has too many tokens for a page.
        AttnlensError: A call failed.
    """
    if rather_than is not None and other is None:
        raise ValueError("rather_than is set without other: set other, the text to contrast it with")
    info = client.get_model(model)
    options = TextOptions(
        prompt_names=(prompt_name, prompt_name), prompts=(prompt, prompt), truncate=truncate
    )
    texts = [text] if other is None else [text, other]
    if note := _missing_explanations(info):
        return result_page(client, info, texts, options, notes=[note])
    if other is None:
        [own] = client.explain(texts, head_contributions=True, **_explain_arguments(options, info))
        return result_page(client, info, texts, options, explanations=[own])
    notes = []
    if matrix not in info.pair_matrices:
        names = ", ".join(info.pair_matrices) or "none"
        notes.append(f"This model does not support the matrix {matrix}. Supported matrices: {names}.")
    comparison = _compare(client, info, text, other, options, None if notes else matrix)
    contrast = None
    if rather_than is not None:
        towards = {"target_prompt_name": prompt_name, "target_prompt": prompt}
        arguments = _explain_arguments(options, info) | towards
        [explanation] = client.explain([text], to=other, rather_than=rather_than, **arguments)
        contrast = (other, rather_than, explanation)
    return result_page(
        client,
        info,
        texts,
        options,
        comparison=comparison,
        matrix=matrix,
        contrast=contrast,
        notes=notes,
    )


def _explain_arguments(options: TextOptions, model: ModelInfo) -> dict[str, Any]:
    """Return arguments of `Client.explain` for the first text."""
    return {
        "prompt_name": options.prompt_names[0],
        "prompt": options.prompts[0],
        "truncate": options.truncate,
        "model": model.name,
    }


def _compare(
    client: BlockingMethods,
    model: ModelInfo,
    text: str,
    other: str,
    options: TextOptions,
    matrix: PairMatrixName | None,
) -> Comparison:
    return client.compare(
        text,
        other,
        matrix=matrix,
        head_contributions=True,
        prompt_name_a=options.prompt_names[0],
        prompt_a=options.prompts[0],
        prompt_name_b=options.prompt_names[1],
        prompt_b=options.prompts[1],
        truncate=options.truncate,
        model=model.name,
    )


def result_page(
    client: BlockingMethods,
    model: ModelInfo,
    texts: Sequence[str],
    options: TextOptions,
    *,
    explanations: Sequence[Explanation] = (),
    comparison: Comparison | None = None,
    matrix: str = "",
    contrast: tuple[str, str, Explanation] | None = None,
    target: str = OWN_EMBEDDING,
    notes: Sequence[str] = (),
) -> Page:
    """Request the attention of texts and return a page with it and with the given explanations.

    Args:
        client: Client.
        model: Description of the model.
        texts: One or two texts.
        options: Prompts and truncation, as in the given explanations.
        explanations: Explanation of each text per token, unless `comparison` is given.
        comparison: Comparison of the two texts.
        matrix: Matrix of `comparison`.
        contrast: Texts `to` and `rather_than`, and the explanation of the first text towards them.
        target: Description of the target of `explanations`.
        notes: Notes for readers of the page.

    Raises:
        ValueError: Scores are per word, or a text has too many tokens for a page.
        AttnlensError: A call failed.
    """
    explained = list(explanations) if comparison is None else [comparison.a, comparison.b]
    for each in (*explained, *([contrast[2]] if contrast else ())):
        if each.unit_ids:
            raise ValueError("scores are per word: request level='tokens', the page adds them up")
    encoded = [_encode(client, model, text, options, place) for place, text in enumerate(texts)]
    if comparison is not None:
        target = OTHER_TEXT_BY_DOT if comparison.function == "dot" else OTHER_TEXT
    results = []
    for place, (text, each) in enumerate(zip(texts, encoded, strict=True)):
        explanation = explained[place] if explained else None
        results.append(_text_result(text, each, explanation, target, _prompt(model, options, place)))
    return build_page(
        model.name,
        results,
        matrix=None
        if comparison is None or comparison.matrix is None
        else PairResult(
            matrix,
            comparison.matrix,
            comparison.similarity,
            comparison.baseline_row,
            comparison.baseline_column,
            comparison.baseline,
        ),
        contrast=None
        if contrast is None
        else ContrastResult(contrast[0], contrast[1], contrast[2].scores[0]),
        notes=notes,
    )


def _encode(
    client: BlockingMethods, model: ModelInfo, text: str, options: TextOptions, place: int
) -> EncodedText:
    """Return the text with the attention weights of all layers and heads."""
    [encoded] = client.encode_stream(
        [text],
        attention=AttentionQuery(view="dense"),
        last_hidden_state=False,
        prompt_name=options.prompt_names[place],
        prompt=options.prompts[place],
        truncate=options.truncate,
        model=model.name,
    )
    return encoded


def _text_result(
    text: str, encoded: EncodedText, explained: Explanation | None, target: str, prompt: str
) -> TextResult:
    return TextResult(
        text=text,
        prompt=prompt,
        tokens=encoded.tokens,
        maps=encoded.attention[0].dense(),
        tokens_total=encoded.num_tokens_total if encoded.truncated else None,
        scores=() if explained is None else explained.scores,
        target=target,
        head_contributions=None if explained is None else explained.head_contributions,
    )


def _prompt(model: ModelInfo, options: TextOptions, place: int) -> str:
    """Return the prompt of a text."""
    prompt = options.prompts[place]
    if prompt is not None:
        return prompt
    return model.prompts.get(options.prompt_names[place] or model.default_prompt_name, "")


def _missing_explanations(model: ModelInfo) -> str:
    """Return why there are no contributions, or "" if there are."""
    if CONTRIBUTIONS in model.explain_methods:
        return ""
    reason = "the bundle has no contributions graph. Export the model again to add it."
    if not model.explain_methods:
        reason = "the server does not support explanations. It may be too old, or started with --no-explain."
    return f"This page shows only attention: {reason}"
