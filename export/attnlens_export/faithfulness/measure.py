"""Measuring: rank correlation with leave-one-out, and what deleting the best tokens does beside the worst.

    effect of a token  = 1 - cosine of the embeddings with and without it
    rank correlation   = Spearman's between scores and effects, of the tokens that are not special
    deletion           = mean over 10 ... 50 % of 1 - cosine after that share of tokens is left out
    deletion difference = deletion, best tokens first, minus deletion, worst first

All are means over texts. Tokens are left out by the attention mask: they keep their places, and [MASK] in
their place would move an embedding by itself. Random numbers and the length of tokens are measured beside the
methods: a method that ranks no better says nothing.

Deletion curves: Samek et al. 2017 (https://arxiv.org/abs/1509.06321), and DeYoung et al. 2020
(https://arxiv.org/abs/1911.03429), who call the two sides comprehensiveness and sufficiency.

T tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnlens.bundle import read_manifest
from attnlens.explanations import (
    ExplainMethod,
    leave_one_out_effects,
    output_shares,
    rank_correlation,
    received_attention,
    rollout,
    unit,
)
from attnlens_export.faithfulness.model import ExplainedModel, Float64Array
from attnlens_export.faithfulness.result import Control, FaithfulnessResult, Measured
from attnlens_export.faithfulness.texts import TokenizedText, read_texts, tokenize
from attnlens_export.progress import StageProgress, no_stage_progress
from attnlens_model import read_config

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
SEED = 20_261_122


def measure_faithfulness(
    directory: Path, texts: Path | None = None, progress: StageProgress = no_stage_progress
) -> FaithfulnessResult:
    """Measure every method of a bundle.

    Args:
        directory: the bundle.
        texts: one text per line; None: the sentences of this package.
        progress: called before each text.

    Raises:
        BundleError: the bundle has no graph of contributions, or no tokenizer.
        SourceError: the file can't be read, or has too few texts.
    """
    manifest, config = read_manifest(directory), read_config(directory / "config.json")
    model = ExplainedModel(directory, manifest, config)
    tokenized = tokenize(directory, read_texts(texts), manifest.max_tokens)
    generator = np.random.default_rng(SEED)
    found: dict[ExplainMethod | Control, list[tuple[float, float]]] = defaultdict(list)
    for number, text in enumerate(tokenized):
        progress("", number, len(tokenized))
        for method, figures in _measure_text(model, text, generator).items():
            found[method].append(figures)
    progress("", len(tokenized), len(tokenized))
    name = "sentences of attnlens" if texts is None else texts.name
    return FaithfulnessResult(
        name,
        len(tokenized),
        float(np.mean([len(text.ids) for text in tokenized])),
        tuple(_summary(method, figures) for method, figures in found.items()),
    )


def _summary(method: ExplainMethod | Control, figures: Sequence[tuple[float, float]]) -> Measured:
    correlations, differences = np.array(figures, dtype=np.float64).T
    known = correlations[np.isfinite(correlations)]
    error = float(known.std(ddof=1) / np.sqrt(len(known))) if len(known) > 1 else float("nan")
    correlation = float(known.mean()) if len(known) else float("nan")
    return Measured(method, correlation, error, float(differences.mean()))


def _measure_text(
    model: ExplainedModel, text: TokenizedText, generator: np.random.Generator
) -> dict[ExplainMethod | Control, tuple[float, float]]:
    """Return the rank correlation and the deletion difference of each method on one text."""
    whole, *others = model.embed(text.ids, [(), *((int(token),) for token in text.ranked)])
    effects = leave_one_out_effects(whole, whole, np.stack(others))
    ranked: dict[ExplainMethod | Control, Float64Array] = {
        ExplainMethod.CONTRIBUTIONS: model.contributions(text.ids)[0][text.ranked],
        ExplainMethod.LEAVE_ONE_OUT: effects,
    }
    hidden, maps = model.hidden_and_attention(text.ids)
    weights = model.weights(len(text.ids))
    ranked[ExplainMethod.ROLLOUT] = rollout(maps, weights)[text.ranked]
    ranked[ExplainMethod.RECEIVED_ATTENTION] = received_attention(maps[-1])[text.ranked]
    if model.is_linear:
        pooled = (weights @ hidden)[: model.num_dimensions].astype(np.float64)
        shares = output_shares(hidden, weights, unit(pooled), float(np.linalg.norm(pooled)))
        ranked[ExplainMethod.OUTPUT_SHARE] = shares[text.ranked]
    ranked[Control.RANDOM] = generator.random(len(text.ranked))
    ranked[Control.TOKEN_LENGTH] = text.lengths[text.ranked].astype(np.float64)
    differences = _deletion_differences(model, text, whole, list(ranked.values()))
    return {
        method: (rank_correlation(scores, effects), difference)
        for (method, scores), difference in zip(ranked.items(), differences, strict=True)
    }


def _deletion_differences(
    model: ExplainedModel, text: TokenizedText, whole: Float64Array, rankings: Sequence[Float64Array]
) -> list[float]:
    """Return the deletion difference of each ranking of the same tokens."""
    counts = [max(1, round(share * len(text.ranked))) for share in SHARES]
    chosen = [
        tuple(int(token) for token in text.ranked[order[:count]])
        for scores in rankings
        for order in _best_and_worst(scores)
        for count in counts
    ]
    left = model.embed(text.ids, chosen)  # (methods * 2 * shares, E)
    moved = (1 - left @ whole).reshape(len(rankings), 2, len(counts)).mean(axis=2)
    return [float(best - worst) for best, worst in moved]


def _best_and_worst(scores: Float64Array) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the places of scores from the largest and from the smallest on, equal ones in order."""
    return np.argsort(-scores, kind="stable"), np.argsort(scores, kind="stable")
