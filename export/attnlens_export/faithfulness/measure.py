"""Measures the faithfulness of explanation methods: rank correlation with leave-one-out, and deletion.

    effect of a token  = 1 - cosine of the embeddings with and without it
    rank correlation   = Spearman's between scores and effects, over the tokens that are not special
    deletion           = mean over 10 ... 50 % of 1 - cosine after that share of tokens is left out
    deletion difference = deletion, best tokens first, minus deletion, worst first

Each is a mean over texts, the rank correlation with a bootstrap confidence interval. Tokens are left out by
the attention mask: they keep their positions, and [MASK] instead of them would move an embedding by itself.
Random numbers and the length of tokens are ranked as controls: a method that ranks no better is useless.

Deletion curves: Samek et al. 2017 (https://arxiv.org/abs/1509.06321), and DeYoung et al. 2020
(https://arxiv.org/abs/1911.03429), who call the two sides comprehensiveness and sufficiency.

T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnlens.bundle import BundleError, read_manifest
from attnlens.explanations import (
    ExplainMethod,
    leave_one_out_effects,
    output_shares,
    rank_correlation,
    received_attention,
    rollout,
    unit,
)
from attnlens_export.errors import SourceError
from attnlens_export.faithfulness.model import ExplainedModel, Float64Array
from attnlens_export.faithfulness.result import Control, FaithfulnessResult, Measured
from attnlens_export.faithfulness.texts import MIN_TEXTS, TokenizedText, read_texts, tokenize
from attnlens_export.progress import StageProgress, no_stage_progress
from attnlens_model import EncoderConfig, read_config

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
SEED = 20_261_122
NUM_RESAMPLES = 2000
# Multiplications with weights that `export` spends on leaving out tokens, about two minutes on two cores. A
# model that needs more for `MIN_TEXTS` texts is not measured.
EXPORT_WORK = 4e12

Ranked = Callable[[TokenizedText], Mapping[ExplainMethod | Control, Float64Array]]
Scores = dict[ExplainMethod | Control, list[Float64Array]]


def measure_faithfulness(
    directory: Path,
    texts: Path | None = None,
    progress: StageProgress = no_stage_progress,
    *,
    with_norm: bool = False,
) -> FaithfulnessResult:
    """Measure the methods of a bundle, with deletion curves.

    Args:
        directory: The bundle.
        texts: A file with one text per line. If None, the sentences of this package.
        progress: Called before each step.
        with_norm: Whether to measure contribution norms, which take one run per embedding component and text.

    Raises:
        BundleError: The bundle has no graph of contributions, or no tokenizer.
        SourceError: The file can't be read, or has too few texts.
    """
    manifest, config = read_manifest(directory), read_config(directory / "config.json")
    tokenized = tokenize(directory, read_texts(texts), manifest.max_tokens)
    model = ExplainedModel(directory, manifest, config)
    scores = _score(model, tokenized, progress, with_norm=with_norm)
    name = "sentences of attnlens" if texts is None else texts.name
    return _result(model, name, tokenized, scores, progress, with_deletion=True)


def measure_at_export(
    directory: Path, progress: StageProgress = no_stage_progress
) -> FaithfulnessResult | None:
    """Measure the rank correlations of a bundle within `EXPORT_WORK`, on the sentences of this package.

    Contribution norms and deletion curves take longer than the rest and are left out.

    Returns:
        None if the bundle can't explain embeddings or read texts, or the model is too large.
    """
    manifest, config = read_manifest(directory), read_config(directory / "config.json")
    try:
        model = ExplainedModel(directory, manifest, config)
        tokenized = tokenize(directory, read_texts(None), manifest.max_tokens)
    except (BundleError, SourceError):
        return None
    work = [len(text.ranked) * len(text.ids) * _weights(config) for text in tokenized]
    tokenized = tokenized[: int(np.searchsorted(np.cumsum(work), EXPORT_WORK, side="right"))]
    if len(tokenized) < MIN_TEXTS:
        return None
    scores = _score(model, tokenized, progress, with_norm=False)
    return _result(model, "sentences of attnlens", tokenized, scores, progress, with_deletion=False)


def _weights(config: EncoderConfig) -> float:
    """Return about how many weights a token is multiplied with."""
    return config.num_layers * config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)


def _score(
    model: ExplainedModel, texts: Sequence[TokenizedText], progress: StageProgress, *, with_norm: bool
) -> Scores:
    """Return the scores of the ranked tokens by method, for each text, graph by graph."""
    generator = np.random.default_rng(SEED)

    def by_contributions(text: TokenizedText) -> dict[ExplainMethod | Control, Float64Array]:
        return {ExplainMethod.CONTRIBUTIONS: model.contributions(text.ids)[0]}

    def by_norm(text: TokenizedText) -> dict[ExplainMethod | Control, Float64Array]:
        return {ExplainMethod.CONTRIBUTION_NORM: model.contribution_norms(text.ids)}

    def by_chance(text: TokenizedText) -> dict[ExplainMethod | Control, Float64Array]:
        return {
            Control.RANDOM: generator.random(len(text.ids)),
            Control.TOKEN_LENGTH: text.lengths.astype(np.float64),
        }

    steps: list[tuple[str, Ranked]] = [
        ("contributions", by_contributions),
        *([("contribution norms", by_norm)] if with_norm else []),
        ("attention", lambda text: _by_attention(model, text)),
        ("controls", by_chance),
    ]
    scores: Scores = {}
    for name, ranked in steps:
        for number, text in enumerate(texts):
            progress(name, number, len(texts))
            for method, values in ranked(text).items():
                scores.setdefault(method, []).append(values[text.ranked])
    return scores


def _by_attention(model: ExplainedModel, text: TokenizedText) -> dict[ExplainMethod | Control, Float64Array]:
    hidden, maps = model.hidden_and_attention(text.ids)
    weights = model.weights(len(text.ids))
    ranked: dict[ExplainMethod | Control, Float64Array] = {}
    if model.has_distributions:
        ranked[ExplainMethod.ROLLOUT] = rollout(maps, weights)
        ranked[ExplainMethod.RECEIVED_ATTENTION] = received_attention(maps[-1])
    if model.is_linear:
        pooled = (weights @ hidden)[: model.num_dimensions].astype(np.float64)
        length = float(np.linalg.norm(pooled))
        ranked[ExplainMethod.OUTPUT_SHARE] = output_shares(hidden, weights, unit(pooled), length)
    return ranked


def _result(
    model: ExplainedModel,
    name: str,
    texts: Sequence[TokenizedText],
    scores: Scores,
    progress: StageProgress,
    *,
    with_deletion: bool,
) -> FaithfulnessResult:
    """Leave out tokens of each text and compare."""
    found: dict[ExplainMethod | Control, list[tuple[float, float]]] = {}
    for number, text in enumerate(texts):
        progress("leaving out tokens", number, len(texts))
        whole, *others = model.embed(text.ids, [(), *((int(token),) for token in text.ranked)])
        effects = leave_one_out_effects(whole, whole, np.stack(others))
        ranked = {method: each[number] for method, each in scores.items()}
        ranked[ExplainMethod.LEAVE_ONE_OUT] = effects
        differences = (
            _deletion_differences(model, text, whole, list(ranked.values()))
            if with_deletion
            else [float("nan")] * len(ranked)
        )
        for (method, values), difference in zip(ranked.items(), differences, strict=True):
            found.setdefault(method, []).append((rank_correlation(values, effects), difference))
    progress("", len(texts), len(texts))
    mean_tokens = float(np.mean([len(text.ids) for text in texts]))
    return FaithfulnessResult(
        name,
        len(texts),
        mean_tokens,
        tuple(_summary(method, figures) for method, figures in found.items()),
    )


def _summary(method: ExplainMethod | Control, figures: Sequence[tuple[float, float]]) -> Measured:
    correlations, differences = np.array(figures, dtype=np.float64).T
    known = correlations[np.isfinite(correlations)]
    low, high = _interval(known)
    mean = float(known.mean()) if len(known) else float("nan")
    return Measured(method, mean, low, high, len(known), float(differences.mean()))


def _interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap confidence interval of a mean. NaN for fewer than two values."""
    if len(values) < 2:  # noqa: PLR2004
        return float("nan"), float("nan")
    generator = np.random.default_rng(SEED)
    means = generator.choice(values, (NUM_RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


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
