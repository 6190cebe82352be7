"""Faithfulness of the explanations of logits, compared with what a server returns for the same texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnlens_server
from attnlens.explanations import ExplainMethod, rank_correlation
from attnlens_client.arguments import ExplainMethodName
from attnlens_export.errors import SourceError
from attnlens_export.faithfulness.measure import measure_at_export, measure_faithfulness, pairs_of

METHODS: tuple[ExplainMethodName, ...] = ("contributions", "rollout", "received_attention")
TEXTS = [f"{first} it was {second}" for first in ("the man", "a sea", "rain") for second in "abcd"]


def expected(bundle: Path, texts: list[Any], label: int | None) -> dict[str, float]:
    """Return the mean rank correlations with leave-one-out over the tokens that are not special."""
    with attnlens_server.local(bundle, threads=1) as model:
        found = []
        for text in texts:
            chosen = label if label is None else int(model.classify([text]).logits[0].argmax())
            [explanation] = model.explain([text], methods=[*METHODS, "leave_one_out"], label=chosen)
            effects = explanation.by("leave_one_out").values
            found.append([rank_correlation(explanation.by(name).values, effects) for name in METHODS])
    return dict(zip(METHODS, np.mean(found, axis=0), strict=True))


@pytest.mark.parametrize("name", ["reranker", "topics"])
def test_rank_correlations_are_those_of_the_server(
    classifier_bundle: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    bundle, file = classifier_bundle(name), tmp_path / "lines.txt"
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    result = measure_faithfulness(bundle, file)
    figures = {figure.name.replace(" ", "_"): figure for figure in result.methods}
    texts = pairs_of(TEXTS) if name == "reranker" else TEXTS
    for method, value in expected(bundle, texts, None if name == "reranker" else 0).items():
        assert figures[method].rank_correlation == pytest.approx(value, abs=1e-3)
    assert figures["leave_one_out"].rank_correlation == pytest.approx(1)
    assert figures["leave_one_out"].deletion_difference > 0
    assert result.num_texts == len(TEXTS)
    assert result.texts == ("pairs of lines.txt" if name == "reranker" else "lines.txt")


def test_export_measures_pairs_of_its_sentences(classifier_bundle: Callable[[str], Path]) -> None:
    result = measure_at_export(classifier_bundle("reranker"))
    assert result is not None
    assert result.texts == "pairs of sentences of attnlens"
    assert ExplainMethod.CONTRIBUTIONS in [figure.method for figure in result.methods]


def test_norms_of_a_classifier_are_rejected(classifier_bundle: Callable[[str], Path]) -> None:
    with pytest.raises(SourceError, match="classifiers have no embeddings"):
        measure_faithfulness(classifier_bundle("topics"), with_norm=True)


def test_queries_start_their_documents_in_turn() -> None:
    assert pairs_of(["a b c", "d e", "f"]) == [("a b", "a b c"), ("d e", "f"), ("f", "f")]
