"""Pages of the viewer, made of what the client returns. `import attnlens_client` alone does not load this.

Letters: L layers, H heads, T tokens.
"""

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
    OWN_EMBEDDING,
    ContrastResult,
    PairResult,
    TextResult,
    build_page,
)

CONTRIBUTIONS: ExplainMethodName = "contributions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How texts are read.

    Attributes:
        prompt_names, prompts: of the first text and of the second one, at most one of the two set for each;
            None: the model's.
        truncate: cut a text that is too long.
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
    """Ask for attention and contributions of one text or two, and return them as a page.

    Args:
        client: of the server.
        text: what the page is about.
        other: a text to compare it with.
        rather_than: a third text: why is `text` nearer to `other` than to it?
        matrix: what to say of pairs of tokens of two texts.
        prompt_name: as in `Client.embed`, for all texts; so are the others.
        prompt: the prompt itself.
        truncate: cut a text that is too long.
        model: its name.

    Raises:
        ValueError: `rather_than` without `other`; a text has too many tokens for a page.
        AttnlensError: a call failed.
    """
    if rather_than is not None and other is None:
        raise ValueError("rather_than needs a second text: why nearer to it than to the third one?")
    told = client.get_model(model)
    reading = Reading(prompt_names=(prompt_name, prompt_name), prompts=(prompt, prompt), truncate=truncate)
    texts = [text] if other is None else [text, other]
    if why := _why_unexplained(told):
        return result_page(client, told, texts, reading, notes=[why])
    if other is None:
        [own] = client.explain(texts, head_contributions=True, **_of_explain(reading, told))
        return result_page(client, told, texts, reading, explanations=[own])
    notes = []
    if matrix not in told.pair_matrices:
        has = ", ".join(told.pair_matrices) or "none"
        notes.append(f"This model has no matrix {matrix} between two texts; of such matrices it has: {has}.")
    compared = _compared(client, told, text, other, reading, None if notes else matrix)
    contrast = None
    if rather_than is not None:
        towards = {"target_prompt_name": prompt_name, "target_prompt": prompt}
        options = _of_explain(reading, told) | towards
        [found] = client.explain([text], to=other, rather_than=rather_than, **options)
        contrast = (other, rather_than, found)
    return result_page(
        client,
        told,
        texts,
        reading,
        comparison=compared,
        matrix=matrix,
        contrast=contrast,
        notes=notes,
    )


def _of_explain(reading: Reading, model: ModelInfo) -> dict[str, Any]:
    """Return the options of `Client.explain` for the first text."""
    return {
        "prompt_name": reading.prompt_names[0],
        "prompt": reading.prompts[0],
        "truncate": reading.truncate,
        "model": model.name,
    }


def _compared(
    client: BlockingMethods,
    model: ModelInfo,
    text: str,
    other: str,
    reading: Reading,
    matrix: PairMatrixName | None,
) -> Comparison:
    return client.compare(
        text,
        other,
        matrix=matrix,
        head_contributions=True,
        prompt_name_a=reading.prompt_names[0],
        prompt_a=reading.prompts[0],
        prompt_name_b=reading.prompt_names[1],
        prompt_b=reading.prompts[1],
        truncate=reading.truncate,
        model=model.name,
    )


def result_page(
    client: BlockingMethods,
    model: ModelInfo,
    texts: Sequence[str],
    reading: Reading,
    *,
    explanations: Sequence[Explanation] = (),
    comparison: Comparison | None = None,
    matrix: str = "",
    contrast: tuple[str, str, Explanation] | None = None,
    target: str = OWN_EMBEDDING,
    notes: Sequence[str] = (),
) -> Page:
    """Ask for the attention of texts, and return it with what has been found out about them as a page.

    Args:
        client: of the server.
        model: what the server says of it.
        texts: one or two.
        reading: as they were read for the other arguments.
        explanations: of each text, of its tokens; empty: none, or those of `comparison`.
        comparison: of the two.
        matrix: which one `comparison` has.
        contrast: the nearer text, the farther one, and what explains the first of `texts` towards them.
        target: what `explanations` add up to, in words.
        notes: for the reader of the page.

    Raises:
        ValueError: scores are those of words; a text has too many tokens for a page.
        AttnlensError: a call failed.
    """
    explained = list(explanations) if comparison is None else [comparison.a, comparison.b]
    for each in (*explained, *([contrast[2]] if contrast else ())):
        if each.unit_ids:
            raise ValueError("the scores are those of words: ask for level='tokens', the page adds them up")
    encoded = [_encoded(client, model, text, reading, place) for place, text in enumerate(texts)]
    target = target if comparison is None else OTHER_TEXT
    return build_page(
        model.name,
        [
            _read(text, each, explained[place] if explained else None, target, _prompt(model, reading, place))
            for place, (text, each) in enumerate(zip(texts, encoded, strict=True))
        ],
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


def _encoded(
    client: BlockingMethods, model: ModelInfo, text: str, reading: Reading, place: int
) -> EncodedText:
    """Return the text with the weights of all layers and heads."""
    [encoded] = client.encode_stream(
        [text],
        attention=AttentionQuery(view="dense"),
        last_hidden_state=False,
        prompt_name=reading.prompt_names[place],
        prompt=reading.prompts[place],
        truncate=reading.truncate,
        model=model.name,
    )
    return encoded


def _read(
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


def _prompt(model: ModelInfo, reading: Reading, place: int) -> str:
    """Return what stands before a text."""
    prompt = reading.prompts[place]
    if prompt is not None:
        return prompt
    return model.prompts.get(reading.prompt_names[place] or model.default_prompt_name, "")


def _why_unexplained(model: ModelInfo) -> str:
    """Say why there are no contributions; nothing where there are."""
    if CONTRIBUTIONS in model.explain_methods:
        return ""
    why = "the bundle has no graph of contributions. Export the model again to have scores here."
    if not model.explain_methods:
        why = "the server does not explain. It is an older one, or was started with --no-explain."
    return f"This page shows attention alone: {why}"
