"""Compares a bundle with the results of its publisher's pipeline, from prompts to labels.

Parity compares a bundle's graphs with our PyTorch encoder, so a misread setting passes. Here both sides start
from text.

Shape legend: T tokens, D hidden size, E embedding size, C labels.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from attnlens.similarity import Similarity
from attnlens_export.contents import Verdict
from attnlens_export.graph.names import HIDDEN_OUTPUT, LOGITS_OUTPUT
from attnlens_export.judge.result import DIFFERENCE, PublisherResult
from attnlens_export.parity.reference import REFERENCE_ERROR_RATIO, TOLERANCE
from attnlens_export.results import Comparison
from attnlens_publisher.reference import Arguments, Arrays, Probe

_MAX_NAMED_TOKENS = 8
_MAX_NAMED_CHARS = 100


@dataclass(frozen=True)
class Facts:
    """Settings of a bundle that decide how texts are read.

    Attributes:
        prompts: Prompts by name.
        default_prompt: Name of the default prompt, or an empty string.
        labels: Labels of a classifier in the order of its logits. None for an embedding model.
        takes_pairs: Whether it joins two texts.
        has_types: Whether its graphs have token types.
        similarity: Function that compares its embeddings.
    """

    prompts: Mapping[str, str]
    default_prompt: str
    labels: tuple[str, ...] | None
    takes_pairs: bool
    has_types: bool
    similarity: Similarity = Similarity.COSINE

    def prompt(self, arguments: Arguments) -> str:
        """Return the text of the prompt that the arguments select, or an empty string."""
        if "prompt" in arguments:
            return arguments["prompt"]
        return self.prompts.get(arguments.get("prompt_name", self.default_prompt), "")


class Subject(Protocol):
    """A bundle, read from its files or served.

    Attributes:
        facts: Its settings.
    """

    facts: Facts

    def tokenize(self, probe: Probe) -> Arrays:
        """Return `ids` and `types`, (T,), of a text or pair with its prompt, truncated."""

    def run(self, probes: Sequence[Probe]) -> Iterator[Arrays]:
        """Yield `hidden` (T, D) and `result`: the embedding (E,), or the logits (C,) with `scores` (C,)."""


@dataclass(frozen=True)
class Rounding:
    """Largest rounding errors of PyTorch in fp32, over all values of all cases of the parity grid.

    Attributes:
        hidden: Of hidden states.
        logits: Of logits. 0 for an embedding model.
    """

    hidden: float
    logits: float = 0.0

    @classmethod
    def measured(cls, verdict: Verdict) -> "Rounding":
        """Return the rounding errors that parity measured."""
        errors = (*verdict.parity.errors, *(verdict.logits.errors if verdict.logits else ()))
        hidden, logits = (
            max((each.torch_max_abs_error_float64 for each in errors if each.role == role), default=0.0)
            for role in (HIDDEN_OUTPUT, LOGITS_OUTPUT)
        )
        return cls(hidden, logits)


def judge(
    published: Mapping[str, Any],
    probes: Sequence[Probe],
    subject: Subject,
    rounding: Rounding,
    skipped: Mapping[str, str],
) -> PublisherResult:
    """Compare the results of `attnlens_publisher.reference.compute` with those of a bundle.

    Args:
        published: Its result without the probes.
        probes: Texts with the publisher's results.
        subject: The bundle.
        rounding: Rounding errors, from which the limits follow.
        skipped: Kinds of results that are not compared, with the reason.
    """
    not_compared = [f"{result}: {reason}" for result, reason in skipped.items()]
    has_modules = published["library"] != "transformers"
    comparisons = list(_compare_settings(published, subject.facts)) if has_modules else []
    if published["similarity"] and "similarity" not in skipped:
        name = subject.facts.similarity.name.lower()
        comparisons.append(_compare_values("similarity", name, published["similarity"]))
    if not has_modules and published["labels"] is None and "embeddings" not in skipped:
        not_compared.append("embeddings: the checkpoint does not define them")
    if published["labels"] is not None and not subject.facts.takes_pairs:
        probes = [probe for probe in probes if isinstance(probe.text, str)]
        if not probes:  # a reranker
            comparisons.append(_compare_values("pairs", "no pairs", "scores of pairs"))
    if "token ids" not in skipped:
        comparisons += _compare_tokens(probes, subject, has_modules=has_modules)
    longest = 0
    if all(found.passed for found in comparisons):
        chosen = [probe for probe in probes if probe.has_vectors]
        longest = max((len(probe.arrays["ids"]) for probe in chosen), default=0)
        comparisons += _compare_vectors(chosen, subject, rounding, skipped, has_modules=has_modules)
    if published["labels"] is not None:
        comparisons.append(_compare_values("labels", subject.facts.labels, tuple(published["labels"])))
    result = PublisherResult(
        title="Publisher's pipeline",
        inputs=f"{len(probes)} texts",
        comparisons=tuple(comparisons),
        library=published["library"],
        versions=published["versions"],
        not_compared=tuple(not_compared),
        longest_tokens=longest,
    )
    return replace(result, reference=result.implementation)


def _compare_settings(published: Mapping[str, Any], facts: Facts) -> Iterator[Comparison]:
    ours = {name: text for name, text in facts.prompts.items() if text}
    yield _compare_values("prompts", ours, dict(published["prompts"]))
    default = facts.default_prompt if facts.prompts.get(facts.default_prompt) else ""
    expected = published["default_prompt"]
    yield _compare_values("default prompt", default, expected if published["prompts"].get(expected) else "")


def _compare_values(result: str, ours: object, theirs: object) -> Comparison:
    differences = _Differences(worst=f"the bundle has {ours!r}, but the publisher {theirs!r}")
    differences.count, differences.error = 1, float(ours != theirs)
    return differences.to_comparison(result, 0.0)


@dataclass
class _Differences:
    """Errors of one kind of result for texts with one prompt, and the worst of them."""

    count: int = 0
    error: float = 0.0
    worst: str = ""

    def add(self, error: float, probe: Probe, ours: str, theirs: str) -> None:
        """Add the error of a text. NaN is worse than any number."""
        if not error <= self.error:
            text = _label(probe)
            shown = text if len(text) <= _MAX_NAMED_CHARS else f"{text[:_MAX_NAMED_CHARS]}..."
            self.error = error
            self.worst = f"for {shown!r}, the bundle has {ours}, but the publisher {theirs}"
        self.count += 1

    def to_comparison(self, result: str, limit: float) -> Comparison:
        """Return the largest error. The graph is unspecified, because all are involved."""
        what = DIFFERENCE + result
        return Comparison("", "", self.error, limit, worst=self.worst, num_texts=self.count, what=what)


def _label(probe: Probe) -> str:
    return probe.text if isinstance(probe.text, str) else " | ".join(probe.text)


def _compare_tokens(probes: Iterable[Probe], subject: Subject, *, has_modules: bool) -> Iterator[Comparison]:
    """Yield the comparisons of token ids, then of token types, each by prompt."""
    found: dict[str, dict[str, _Differences]] = {"token ids": {}, "token types": {}}
    counts: dict[str, dict[str, int]] = {"token ids": {}, "token types": {}}
    for probe in probes:
        tokens, prompt = subject.tokenize(probe), _suffix(probe, has_modules=has_modules)
        for result, name in (("token ids", "ids"), ("token types", "types"))[: 1 + subject.facts.has_types]:
            ours, theirs = tokens[name].tolist(), probe.arrays[name].tolist()
            differs = ours != theirs
            differences = found[result].setdefault(prompt, _Differences())
            counts[result][prompt] = counts[result].get(prompt, 0) + differs
            differences.add(float(differs), probe, *_describe_tokens(ours, theirs))
            if differs:
                break
    for result, by_prompt in found.items():
        for prompt, differences in by_prompt.items():
            differences.error = float(counts[result][prompt])
            yield differences.to_comparison(result + prompt, 0.0)


def _suffix(probe: Probe, *, has_modules: bool) -> str:
    if not has_modules or not probe.arguments:
        return ""
    name = probe.arguments.get("prompt_name")
    return " (no prompt)" if name is None else f" (prompt {name})"


def _describe_tokens(ours: list[int], theirs: list[int]) -> tuple[str, str]:
    """Return the tokens around the first difference, and the number of all tokens."""
    first = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    start = min(len(ours), len(theirs)) if first is None else first

    def describe(tokens: list[int]) -> str:
        part = ", ".join(map(str, tokens[start : start + _MAX_NAMED_TOKENS]))
        more = ", ..." if start + _MAX_NAMED_TOKENS < len(tokens) else ""
        return f"[{part}{more}] from token {start} of {len(tokens)}"

    return describe(ours), describe(theirs)


def _compare_vectors(
    probes: Sequence[Probe],
    subject: Subject,
    rounding: Rounding,
    skipped: Mapping[str, str],
    *,
    has_modules: bool,
) -> Iterator[Comparison]:
    """Yield the comparisons of hidden states, then of the final results, each by prompt."""
    is_scorer = any("scores" in probe.arrays for probe in probes)
    largest = (
        max((float(np.abs(probe.arrays["result"]).max()) for probe in probes), default=1) if is_scorer else 1
    )
    limits = {"hidden": _limit(rounding.hidden, 1), "result": _limit(rounding.hidden, 1)}
    if is_scorer:
        limits["result"] = limits["scores"] = _limit(rounding.logits, largest)
    similarities = [
        abs(float(probe.arrays["similarity"][0])) for probe in probes if "similarity" in probe.arrays
    ]
    limits["similarity"] = limits["result"] * max([1.0, *similarities])
    names = {"hidden": "hidden states", "result": "logits" if is_scorer else "embeddings", "scores": "scores"}
    if not skipped.keys() & {"similarity", "embeddings"}:
        names["similarity"] = "similarities"
    found: dict[str, dict[str, _Differences]] = {kind: {} for kind in names}
    for probe, arrays in zip(probes, _run(probes, subject), strict=True):
        prompt = _suffix(probe, has_modules=has_modules)
        for kind in names.keys() & probe.arrays.keys():
            ours, theirs = arrays[kind], probe.arrays[kind]
            differences = found[kind].setdefault(prompt, _Differences())
            differences.add(
                _error(ours, theirs, is_embedding=names[kind] == "embeddings"),
                probe,
                *_describe(ours, theirs),
            )
    for kind, by_prompt in found.items():
        for prompt, differences in by_prompt.items():
            if names[kind] not in skipped:
                yield differences.to_comparison(names[kind] + prompt, limits[kind])


def _run(probes: Sequence[Probe], subject: Subject) -> Iterator[Arrays]:
    """Yield the results of a bundle, with the `similarity` (1,) of embeddings with the first one."""
    first: Any = None
    for probe, arrays in zip(probes, subject.run(probes), strict=True):
        if "similarity" in probe.arrays:
            first = arrays["result"] if first is None else first
            arrays["similarity"] = np.array([subject.facts.similarity.of(first, arrays["result"])])
        yield arrays


def _limit(rounding: float, scale: float) -> float:
    """Return the largest difference that passes.

    It is twice that of parity, because the bundle and the publisher's pipeline both differ from our encoder.
    """
    return 2 * max(TOLERANCE * max(1.0, scale), REFERENCE_ERROR_RATIO * rounding)


def _error(ours: Any, theirs: Any, *, is_embedding: bool) -> float:  # noqa: ANN401 - arrays of any type
    """Return the largest difference, of an embedding in units of the larger of 1 and its length."""
    if ours.shape != theirs.shape:
        return math.inf
    scale = max(1.0, float(np.linalg.norm(theirs))) if is_embedding else 1.0
    return float(np.abs(np.subtract(ours, theirs, dtype=np.float64)).max()) / scale


def _describe(ours: Any, theirs: Any) -> tuple[str, str]:  # noqa: ANN401 - arrays of any type
    """Return the values with the largest difference, and their position."""
    if ours.shape != theirs.shape:
        return f"the shape {ours.shape}", f"the shape {theirs.shape}"
    error = np.nan_to_num(np.abs(np.subtract(ours, theirs, dtype=np.float64)), nan=np.inf)
    index = np.unravel_index(int(error.argmax()), error.shape)
    place = ", ".join(str(int(axis)) for axis in index)
    return f"{float(ours[index]):.7g} at [{place}]", f"{float(theirs[index]):.7g}"
