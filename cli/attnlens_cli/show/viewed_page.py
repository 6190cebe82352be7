"""What the client returned of one text or two, as a page of the viewer."""

from collections.abc import Sequence

from attnlens_client import EncodedText, ModelInfo
from attnlens_viewer import Page, ViewedText, viewed_tokens

_MAX_TITLE = 90
_LABELS = ("First text", "Second text")


def page_of(model: ModelInfo, results: Sequence[EncodedText], texts: Sequence[str], prompt: str) -> Page:
    """Return the page of one text, or of two that are compared.

    Args:
        model: what the server says of it.
        results: of the texts, each with the weights of all layers and heads.
        texts: as they were given.
        prompt: what was put before each.

    Raises:
        ValueError: a text has no tokens, or too many for a page.
    """
    labels = ("Text",) if len(texts) == 1 else _LABELS
    viewed = [
        ViewedText(
            label=label,
            tokens=viewed_tokens(result.tokens, {"text": text, "prompt": prompt}),
            maps=result.attention[0].dense(),
            tokens_total=result.num_tokens_total if result.truncated else None,
        )
        for label, result, text in zip(labels, results, texts, strict=True)
    ]
    return Page(title=title_of(texts), model=model.name, texts=viewed)


def title_of(texts: Sequence[str]) -> str:
    """Return the beginning of each text."""
    room = _MAX_TITLE // len(texts)
    lines = [" ".join(text.split()) for text in texts]
    return " / ".join(line if len(line) <= room else line[: room - 1].rstrip() + "…" for line in lines)
