"""Faithfulness of explanation methods: rank correlation with leave-one-out, and deletion curves.

    effect of a token   = 1 - cosine of the embeddings with and without the token
    rank correlation    = Spearman's correlation of scores and effects, over tokens that are not special
    deletion            = mean of 1 - cosine after removing 10, 20, 30, 40 and 50 % of the tokens
    deletion difference = deletion, highest scores first, minus deletion, lowest scores first

For a classifier, the effect of a token is instead the decrease of the highest logit, and the deletion curves
show decreases of this logit. The texts of a reranker are pairs of a query and a document.

Each figure is a mean over texts. The rank correlation has a bootstrap confidence interval. Tokens are removed
with the attention mask and keep their positions: replacing them by [MASK] would itself change the embedding.
Random numbers and token lengths are ranked as controls. A method that is not better than these is useless.

Deletion curves: Samek et al. 2017 (https://arxiv.org/abs/1509.06321), and DeYoung et al. 2020
(https://arxiv.org/abs/1911.03429), who call the two directions comprehensiveness and sufficiency.

Shapes: T tokens, E embedding size.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens.bundle import BundleError, read_manifest
from attnlens.explanations import (
    MAX_MEASURED_TOKENS,
    MIN_MEASURED_TOKENS,
    ExplainMethod,
    leave_one_out_effects,
    output_shares,
    rank_correlation,
    received_attention,
    rollout,
    to_unit_length,
)
from attnlens.v1.explanation_pb2 import ExplainMethod as ExplainMethodNumber
from attnlens.v1.explanation_pb2 import Faithfulness
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.errors import SourceError
from attnlens_export.faithfulness.model import ExplainedModel, Float64Array
from attnlens_export.json_files import finite, read_object
from attnlens_export.progress import StageProgress, no_stage_progress, report_each
from attnlens_export.report import REPORT_JSON, add_section
from attnlens_export.tokenizer.read import BundleTokenizer
from attnlens_model import EncoderConfig, read_config

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
SEED = 20_261_122
NUM_RESAMPLES = 2000
MIN_TEXTS = 10
# Number of multiplications with weights that `export` spends on leave-one-out: about six seconds on two
# cores. `MIN_TEXTS` texts may take more, up to two minutes. If a model needs more, it is not measured.
EXPORT_WORK = 2e11
MAX_EXPORT_WORK = 4e12
PACKAGE_TEXTS = "sentences of attnlens"
_KEY = "faithfulness"
_HEADING = "## Faithfulness of explanations"


class Control(StrEnum):
    """Scores that explain nothing, for comparison."""

    RANDOM = "random numbers"
    TOKEN_LENGTH = "length of the token"  # noqa: S105 - not a password


Scores = Mapping[ExplainMethod | Control, Float64Array]
"""Scores of the tokens of a text, by method."""


@dataclass(frozen=True)
class TokenizedText:
    """A text.

    Attributes:
        ids: Token ids, (T,).
        ranked: Indices of the tokens that are not special, in ascending order.
        lengths: Number of characters of each token, (T,).
        types: Types of the tokens of a pair, (T,). None means zeros.
        direction: Factors of the logits of a classifier in the target, (C,). None for an embedding.
    """

    ids: npt.NDArray[np.int64]
    ranked: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    types: npt.NDArray[np.int64] | None = None
    direction: Float64Array | None = None


_UNDEFINED = (
    "A rank correlation is undefined where all ranked tokens have the same score: the output share of a\n"
    "model that pools one token, for example, is 0 for all others."
)


@dataclass(frozen=True)
class MethodResult:
    """Figures of a method or a control.

    Attributes:
        method: Method or control.
        rank_correlation: Mean over texts. NaN if it is undefined in all of them, because their ranked tokens
            have equal scores: for example, the output share where only the last token is pooled.
        interval_low: Lower end of the 95 % bootstrap confidence interval over texts.
        interval_high: Upper end.
        num_texts: Number of texts with a defined rank correlation.
        deletion_difference: Mean over texts. NaN if not measured.
    """

    method: ExplainMethod | Control
    rank_correlation: float
    interval_low: float
    interval_high: float
    num_texts: int
    deletion_difference: float

    @property
    def number(self) -> ExplainMethodNumber.ValueType:
        """Method in the protocol. Unspecified for a control."""
        if isinstance(self.method, Control):
            return ExplainMethodNumber.EXPLAIN_METHOD_UNSPECIFIED
        return ExplainMethodNumber.Value(f"EXPLAIN_METHOD_{self.method.name}")

    @property
    def name(self) -> str:
        """Name for tables."""
        return (
            self.method.value
            if isinstance(self.method, Control)
            else self.method.name.lower().replace("_", " ")
        )

    @property
    def correlation(self) -> str:
        """Rank correlation for tables."""
        return "undefined" if math.isnan(self.rank_correlation) else f"{self.rank_correlation:.3f}"

    @property
    def interval(self) -> str:
        """Confidence interval for tables. Empty if fewer than two texts have a rank correlation."""
        if math.isnan(self.interval_low):
            return ""
        return f"{self.interval_low:.3f} to {self.interval_high:.3f}"

    @property
    def deletion(self) -> str:
        """Deletion difference for tables. Empty if not measured."""
        return "" if math.isnan(self.deletion_difference) else f"{self.deletion_difference:.3f}"


@dataclass(frozen=True)
class FaithfulnessResult:
    """Figures of all methods and controls. They have no limits.

    Attributes:
        texts: Origin of the texts.
        num_texts: Number of texts.
        mean_tokens: Mean number of tokens of a text, including special tokens.
        methods: Figures by method.
    """

    texts: str
    num_texts: int
    mean_tokens: float
    methods: tuple[MethodResult, ...]

    def sorted(self) -> list[MethodResult]:
        """Return the methods by descending rank correlation."""
        return sorted(self.methods, key=lambda result: -np.nan_to_num(result.rank_correlation, nan=-2))

    def to_messages(self) -> list[Faithfulness]:
        """Return the manifest entries of methods with a rank correlation on at least two texts.

        Figures are rounded, so that the rounding errors of a graph do not change the manifest.
        """
        return [
            Faithfulness(
                method=result.number,
                control=result.method.value if isinstance(result.method, Control) else "",
                rank_correlation=round(result.rank_correlation, 3),
                interval_low=round(result.interval_low, 3),
                interval_high=round(result.interval_high, 3),
                num_texts=result.num_texts,
                deletion_difference=round(result.deletion_difference, 3),
            )
            for result in self.sorted()
            if math.isfinite(result.interval_low)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values. Non-finite numbers become None."""
        rows = [
            {
                "method": result.name,
                "rank_correlation": result.rank_correlation,
                "interval_low": result.interval_low,
                "interval_high": result.interval_high,
                "num_texts": result.num_texts,
                "deletion_difference": result.deletion_difference,
            }
            for result in self.sorted()
        ]
        return {
            "texts": self.texts,
            "num_texts": self.num_texts,
            "mean_tokens": self.mean_tokens,
            "methods": [finite(row) for row in rows],
        }

    def page(self) -> str:
        """Return the section of the report."""
        rows = [
            f"| {result.name} | {result.correlation} | {result.interval} "
            f"| {result.num_texts} | {result.deletion} |"
            for result in self.sorted()
        ]
        introduction = (
            f"{self.num_texts} texts ({self.texts}) with {self.mean_tokens:.1f} tokens on average. The rank\n"
            "correlation is Spearman's with leave-one-out, with its 95 % bootstrap confidence interval.\n"
            "The deletion difference, measured by `attnlens check --faithfulness`, is how much more the\n"
            "embedding changes when the 10 to 50 % of tokens with the highest scores are removed than when\n"
            "those with the lowest scores are."
        )
        if any(math.isnan(result.rank_correlation) for result in self.methods):
            introduction += f"\n\n{_UNDEFINED}"
        titles = "| method | rank correlation | 95 % interval | texts | deletion difference |"
        table = [titles, "|---|---|---|---|---|", *rows]
        return f"{_HEADING}\n\n{introduction}\n\n" + "\n".join(table) + "\n"


def record(directory: Path, result: FaithfulnessResult) -> Manifest:
    """Write a result into the report and the manifest of a bundle. Replaces an earlier result.

    Returns:
        The new manifest. It changes the model version that a server reports.
    """
    manifest = read_manifest(directory)
    del manifest.faithfulness[:]
    manifest.faithfulness.extend(result.to_messages())
    add_section(directory, manifest, _KEY, result.to_json(), result.page())
    return manifest


def read_recorded_texts(directory: Path) -> tuple[str, int]:
    """Return the origin and the number of the texts on which the result in a bundle's report was measured."""
    recorded = read_object(directory / REPORT_JSON).get(_KEY) or {}
    return recorded.get("texts", ""), recorded.get("num_texts", 0)


def read_texts(path: Path | None) -> list[str]:
    """Return one text per non-empty line of a file. If `path` is None, the sentences of this package.

    Raises:
        SourceError: The file can't be read as UTF-8.
    """
    if path is None:
        content = (files("attnlens_export.faithfulness") / "data" / "sentences.txt").read_text("utf-8")
        return content.splitlines()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} can't be read as text: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def pairs_of(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of a query and a document. In turn, the query starts the document or does not."""
    pairs = []
    for number, line in enumerate(lines):
        words = line.split()
        start, following = " ".join(words[: (len(words) + 1) // 2]), lines[(number + 1) % len(lines)]
        pairs.append((line, following) if number % 2 else (start, line))
    return pairs


def tokenize(
    directory: Path, texts: Sequence[str] | Sequence[tuple[str, str]], max_tokens: int
) -> list[TokenizedText]:
    """Tokenize texts without a prompt. Texts with fewer than `MIN_MEASURED_TOKENS` tokens are omitted.

    Raises:
        BundleError: The bundle has no tokenizer.
        SourceError: Fewer than `MIN_TEXTS` texts remain.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise BundleError(f"{path} does not exist: faithfulness is measured on texts and needs a tokenizer")
    tokenizer = BundleTokenizer(path, min(max_tokens, MAX_MEASURED_TOKENS))
    tokenized = list(_tokenize(tokenizer, texts))
    if len(tokenized) < MIN_TEXTS:
        raise SourceError(
            f"only {len(tokenized)} texts have at least {MIN_MEASURED_TOKENS} tokens, but {MIN_TEXTS} are "
            "needed: add lines to the file of --texts"
        )
    return tokenized


def _tokenize(
    tokenizer: BundleTokenizer, texts: Sequence[str] | Sequence[tuple[str, str]]
) -> Iterator[TokenizedText]:
    for text, encoding in zip(texts, tokenizer.encode(texts), strict=True):
        ranked = np.array(tokenizer.select_text(encoding, text), np.int64)
        if len(ranked) >= MIN_MEASURED_TOKENS:
            lengths = np.array([end - start for start, end in encoding.offsets], dtype=np.int64)
            ids, types = (np.array(row, dtype=np.int64) for row in (encoding.ids, encoding.type_ids))
            yield TokenizedText(ids, ranked, lengths, types)


def _tokenized(
    directory: Path, model: ExplainedModel, lines: Sequence[str], max_tokens: int
) -> list[TokenizedText]:
    """Tokenize lines, or pairs of lines for a reranker. See `tokenize`."""
    return tokenize(directory, pairs_of(lines) if model.takes_pairs else lines, max_tokens)


def _with_directions(model: ExplainedModel, texts: Sequence[TokenizedText]) -> list[TokenizedText]:
    """Return the texts of a classifier with the directions of their highest logits."""
    if not model.is_logit:
        return list(texts)
    logits = [model.embed(text.ids, [()], text.types)[0] for text in texts]
    directions = [np.eye(len(row))[row.argmax()] for row in logits]
    return [replace(text, direction=direction) for text, direction in zip(texts, directions, strict=True)]


def measure_faithfulness(
    directory: Path,
    texts: Path | None = None,
    progress: StageProgress = no_stage_progress,
    *,
    with_norm: bool = False,
) -> FaithfulnessResult:
    """Measure the methods of a bundle, with deletion curves.

    Args:
        directory: Bundle directory.
        texts: File with one text per line. If None, the sentences of this package.
        progress: Called before each step.
        with_norm: Whether to measure contribution norms, which take one run per embedding component and text.

    Raises:
        BundleError: The bundle has no contribution graph or no tokenizer.
        SourceError: The file can't be read or has too few texts.
    """
    manifest, config = read_manifest(directory), read_config(directory / "config.json")
    model = ExplainedModel(directory, manifest, config)
    if model.is_logit and with_norm:
        raise SourceError("classifiers have no embeddings, whose parts contribution norms score: omit them")
    tokenized = _tokenized(directory, model, read_texts(texts), manifest.max_tokens)
    tokenized = _with_directions(model, tokenized)
    scores = _score(model, tokenized, progress, with_norm=with_norm)
    name = _texts_name(model, None if texts is None else texts.name)
    return _compare(model, name, tokenized, scores, progress, with_deletion=True)


def measure_at_export(
    directory: Path, progress: StageProgress = no_stage_progress
) -> FaithfulnessResult | None:
    """Measure the rank correlations of a bundle on the sentences of this package.

    The number of sentences follows from `EXPORT_WORK` and `MAX_EXPORT_WORK`. Contribution
    norms and deletion curves would take longer than everything else and are omitted.

    Returns:
        The result. None if the bundle has no contribution graph or no tokenizer, or if the model is too
        large.
    """
    manifest, config = read_manifest(directory), read_config(directory / "config.json")
    try:
        model = ExplainedModel(directory, manifest, config)
        tokenized = _tokenized(directory, model, read_texts(None), manifest.max_tokens)
    except (BundleError, SourceError):
        return None
    work = [len(text.ranked) * len(text.ids) * _num_weights(config) for text in tokenized]
    limits = {EXPORT_WORK: len(work), MAX_EXPORT_WORK: MIN_TEXTS}
    totals = np.cumsum(work)
    counts = [min(int(np.searchsorted(totals, limit, side="right")), most) for limit, most in limits.items()]
    tokenized = tokenized[: max(counts)]
    if len(tokenized) < MIN_TEXTS:
        return None
    tokenized = _with_directions(model, tokenized)
    scores = _score(model, tokenized, progress, with_norm=False)
    return _compare(model, _texts_name(model), tokenized, scores, progress, with_deletion=False)


def _texts_name(model: ExplainedModel, name: str | None = None) -> str:
    return f"{'pairs of ' if model.takes_pairs else ''}{name or PACKAGE_TEXTS}"


def _num_weights(config: EncoderConfig) -> float:
    """Return the approximate number of weights that a token is multiplied with."""
    return config.num_layers * config.hidden_size * (4 * config.hidden_size + 2 * config.intermediate_size)


def _score(
    model: ExplainedModel, texts: Sequence[TokenizedText], progress: StageProgress, *, with_norm: bool
) -> dict[ExplainMethod | Control, list[Float64Array]]:
    """Return the scores of the ranked tokens of each text by method. Only one graph is open at a time."""
    generator = np.random.default_rng(SEED)

    def contributions(text: TokenizedText) -> Scores:
        scores, _ = model.contributions(text.ids, text.types, text.direction)
        return {ExplainMethod.CONTRIBUTIONS: scores}

    def contribution_norms(text: TokenizedText) -> Scores:
        return {ExplainMethod.CONTRIBUTION_NORM: model.contribution_norms(text.ids)}

    def controls(text: TokenizedText) -> Scores:
        return {
            Control.RANDOM: generator.random(len(text.ids)),
            Control.TOKEN_LENGTH: text.lengths.astype(np.float64),
        }

    steps: list[tuple[str, Callable[[TokenizedText], Scores]]] = [
        ("contributions", contributions),
        *([("contribution norms", contribution_norms)] if with_norm else []),
        ("attention", lambda text: _attention_scores(model, text)),
        ("controls", controls),
    ]
    scores: dict[ExplainMethod | Control, list[Float64Array]] = {}
    for name, score in steps:
        for text in report_each(texts, progress, name):
            for method, values in score(text).items():
                scores.setdefault(method, []).append(values[text.ranked])
    return scores


def _attention_scores(model: ExplainedModel, text: TokenizedText) -> Scores:
    hidden, attention = model.hidden_and_attention(text.ids, text.types)
    weights = model.weights(len(text.ids))
    scores: dict[ExplainMethod | Control, Float64Array] = {}
    if model.has_distributions:
        scores[ExplainMethod.ROLLOUT] = rollout(attention, weights)
        scores[ExplainMethod.RECEIVED_ATTENTION] = received_attention(attention[-1])
    if model.is_linear:
        pooled = (weights @ hidden)[: model.num_dimensions].astype(np.float64)
        length = float(np.linalg.norm(pooled))
        scores[ExplainMethod.OUTPUT_SHARE] = output_shares(hidden, weights, to_unit_length(pooled), length)
    return scores


def _compare(
    model: ExplainedModel,
    name: str,
    texts: Sequence[TokenizedText],
    scores: Mapping[ExplainMethod | Control, Sequence[Float64Array]],
    progress: StageProgress,
    *,
    with_deletion: bool,
) -> FaithfulnessResult:
    """Compare scores with the effects of removing tokens."""
    figures: dict[ExplainMethod | Control, list[tuple[float, float]]] = {}
    for index, text in enumerate(report_each(texts, progress, "leaving out tokens")):
        selections = [(), *((int(token),) for token in text.ranked)]
        whole, *others = model.embed(text.ids, selections, text.types)
        direction = whole if text.direction is None else text.direction
        effects = leave_one_out_effects(direction, whole, np.stack(others))
        rankings = {method: of_texts[index] for method, of_texts in scores.items()}
        rankings[ExplainMethod.LEAVE_ONE_OUT] = effects
        differences = (
            _deletion_differences(model, text, whole, list(rankings.values()))
            if with_deletion
            else [float("nan")] * len(rankings)
        )
        for (method, values), difference in zip(rankings.items(), differences, strict=True):
            figures.setdefault(method, []).append((rank_correlation(values, effects), difference))
    progress("", len(texts), len(texts))
    mean_tokens = float(np.mean([len(text.ids) for text in texts]))
    methods = tuple(_summarize(method, of_texts) for method, of_texts in figures.items())
    return FaithfulnessResult(name, len(texts), mean_tokens, methods)


def _summarize(method: ExplainMethod | Control, figures: Sequence[tuple[float, float]]) -> MethodResult:
    correlations, differences = np.array(figures, dtype=np.float64).T
    defined = correlations[np.isfinite(correlations)]
    low, high = _confidence_interval(defined)
    mean = float(defined.mean()) if len(defined) else float("nan")
    return MethodResult(method, mean, low, high, len(defined), float(differences.mean()))


def _confidence_interval(values: Float64Array) -> tuple[float, float]:
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
    """Return the deletion difference of each ranking of the tokens of a text."""
    counts = [max(1, round(share * len(text.ranked))) for share in SHARES]
    removed = [
        tuple(int(token) for token in text.ranked[order[:count]])
        for scores in rankings
        for order in (np.argsort(-scores, kind="stable"), np.argsort(scores, kind="stable"))
        for count in counts
    ]
    embeddings = model.embed(text.ids, removed, text.types)  # (rankings * 2 * shares, E)
    direction = whole if text.direction is None else text.direction
    deletion = (
        (whole @ direction - embeddings @ direction).reshape(len(rankings), 2, len(counts)).mean(axis=2)
    )
    return [float(highest - lowest) for highest, lowest in deletion]
