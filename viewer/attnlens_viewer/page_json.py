"""Serializes a page, except for its attention maps, to JSON. `viewer/src/data.ts` declares the same types."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_viewer.initial_view import initial_view
from attnlens_viewer.page import Contrast, Page, PairMatrix, Scores, ViewedText, ViewedToken

VERSION = 1
_DIGITS = 6  # significant digits; the page displays up to four


def page_json(page: Page, *, kept: int | None, reason: str) -> dict[str, object]:
    """Convert a page to JSON types.

    Args:
        page: Page to convert.
        kept: Number of weights kept per row of the maps. None if the maps are complete.
        reason: Why the maps are reduced: "requested" or "size". Empty if they are complete.
    """
    return {
        "version": VERSION,
        "title": page.title,
        "model": page.model,
        "kept": kept,
        "reason": reason,
        "texts": [_text(text) for text in page.texts],
        "pair": None if page.pair is None else _pair(page.pair),
        "contrast": None if page.contrast is None else _contrast(page.contrast),
        "labels": [
            {"layer": labels.layer, "head": labels.head, "labels": list(labels.labels)}
            for labels in page.labels
        ],
        "notes": list(page.notes),
    }


def _text(text: ViewedText) -> dict[str, object]:
    heads = text.head_contributions
    return {
        "label": text.label,
        "tokens": [token_json(token) for token in text.tokens],
        "layers": text.num_layers,
        "heads": text.num_heads,
        "scores": [_scores(scores) for scores in text.scores],
        "headContributions": None if heads is None else _rounded(heads),
        "tokensTotal": text.tokens_total,
        "start": dataclasses.asdict(initial_view(text)),
    }


def token_json(token: ViewedToken) -> dict[str, object]:
    """Return the fields of a token, omitting default values."""
    fields: dict[str, object] = {"text": token.text, "word": token.word}
    if token.shown != token.text:
        fields["shown"] = token.shown
    if token.is_special:
        fields["special"] = True
    if token.is_joined:
        fields["joined"] = True
    return fields


def _scores(scores: Scores) -> dict[str, object]:
    return {
        "method": scores.method,
        "target": scores.target,
        "values": _rounded(scores.values),
        "baseline": scores.baseline,
        "sum": scores.sum,
        "expectedSum": scores.expected_sum,
        "rho": scores.rho,
        "description": scores.description,
    }


def _pair(pair: PairMatrix) -> dict[str, object]:
    return {
        "name": pair.name,
        "values": _rounded(pair.values),
        "baselineRow": None if pair.baseline_row is None else _rounded(pair.baseline_row),
        "baselineColumn": None if pair.baseline_column is None else _rounded(pair.baseline_column),
        "baseline": pair.baseline,
        "similarity": pair.similarity,
        "description": pair.description,
    }


def _contrast(contrast: Contrast) -> dict[str, object]:
    return {
        "to": contrast.to,
        "ratherThan": contrast.rather_than,
        "scores": _scores(contrast.scores),
    }


def _rounded(values: npt.NDArray[Any]) -> object:
    """Return nested lists of rounded numbers."""
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [float(f"{value:.{_DIGITS}g}") for value in values.astype(np.float64).tolist()]
