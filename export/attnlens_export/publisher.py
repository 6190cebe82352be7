"""Comparison of a bundle with the publisher's own implementation: transformers or sentence-transformers.

Parity compares a bundle's graphs with our PyTorch encoder, so a misread configuration passes. Here both sides
start from text: token ids, hidden states and, if the checkpoint has sentence-transformers modules, final
embeddings with each prompt. For a classifier or reranker: token ids, logits and scores of texts and pairs.

Shape legend: T tokens, D hidden size, E embedding size, C labels.
"""

import importlib.metadata
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from attnlens.v1.manifest_pb2 import PoolingDefaults
from attnlens_export.classification import LogitsResult
from attnlens_export.errors import SourceError
from attnlens_export.graph.names import HIDDEN_OUTPUT
from attnlens_export.int8.texts import read_kinds
from attnlens_export.json_files import finite
from attnlens_export.parity.measure import ParityResult
from attnlens_export.parity.reference import max_abs_difference
from attnlens_export.progress import StageProgress
from attnlens_export.published.pooling import read_pooling

FloatArray = npt.NDArray[np.float32]
TextOrPair: TypeAlias = str | tuple[str, str]
Scored: TypeAlias = tuple[list[int], FloatArray, FloatArray]
"""Token ids (T,), logits (C,) and scores (C,)."""
_Reference = TypeVar("_Reference")

TEXTS_PER_KIND = 3
CASED_TEXT = "The NASA engineers in Zürich and São Paulo read Dr. O'Brien's REPORT twice."
MAX_TOKENS = 512
"""Texts are truncated to this length, or to the model's own limit if it is lower."""


class Embedder(Protocol):
    """A served bundle. Longer texts are truncated to `max_tokens`, which is at most `MAX_TOKENS`."""

    max_tokens: int

    def encode(self, text: str, prompt_name: str | None) -> tuple[list[int], FloatArray]:
        """Return token ids (T,), special tokens included, and the hidden states (T, D) of the last layer."""

    def embed(self, text: str, prompt_name: str | None) -> FloatArray:
        """Return the final embedding (E,)."""


class Scorer(Protocol):
    """A served classifier or reranker. Longer texts are truncated to `max_tokens`, see `Embedder`."""

    max_tokens: int

    def score(self, text: TextOrPair, prompt_name: str | None) -> Scored:
        """Return token ids (T,), special tokens included, logits (C,) and scores (C,)."""


@dataclass(frozen=True)
class Comparison:
    """One kind of result, compared over all texts.

    Attributes:
        result: `token ids`, `hidden states`, `embeddings`, `logits` or `scores`, with the prompt name if any.
        num_texts: Number of texts compared.
        max_abs_error: Largest absolute difference; for token ids, the number of texts whose ids differ.
        limit: Largest error that passes.
        worst_text: Text with the largest error.
    """

    result: str
    num_texts: int
    max_abs_error: float
    limit: float
    worst_text: str

    @property
    def passed(self) -> bool:
        """Whether the error is within its limit. A NaN is not."""
        return self.max_abs_error <= self.limit


@dataclass(frozen=True)
class PublisherResult:
    """All comparisons with one implementation.

    Attributes:
        implementation: Name and version, for example `sentence-transformers 6.2.0`.
        comparisons: One per kind of result and prompt.
        not_compared: Results that were not compared, with the reason.
    """

    implementation: str
    comparisons: tuple[Comparison, ...]
    not_compared: tuple[str, ...] = ()

    def failures(self) -> list[str]:
        """Return a line per comparison that failed."""
        lines = []
        for found in self.comparisons:
            if not found.passed:
                error = (
                    f"differ in {found.max_abs_error:.0f} of {found.num_texts} texts"
                    if found.result.startswith("token ids")
                    else f"differ by {found.max_abs_error:.2e} (allowed {found.limit:.2e})"
                )
                lines.append(
                    f"{found.result} {error} from {self.implementation}, for example {found.worst_text!r}"
                )
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return every comparison as JSON values."""
        rows = [finite({**vars(found), "passed": found.passed}) for found in self.comparisons]
        return {
            "implementation": self.implementation,
            "passed": not self.failures(),
            "comparisons": rows,
            "not_compared": list(self.not_compared),
        }


class _Transformers:
    """`AutoTokenizer` and `AutoModel`, or the encoder half of an encoder-decoder, in fp32 on the CPU."""

    def __init__(self, source: str, revision: str | None, max_tokens: int) -> None:
        import transformers  # noqa: PLC0415 - optional

        self.name = f"transformers {transformers.__version__}"
        self.prompts: dict[str, str] = {}
        self._max_tokens = max_tokens
        options: dict[str, Any] = {"revision": revision} if revision else {}
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        is_pair = transformers.AutoConfig.from_pretrained(source, **options).is_encoder_decoder
        model_class = transformers.AutoModelForTextEncoding if is_pair else transformers.AutoModel
        self._model = model_class.from_pretrained(source, dtype="float32", **options).eval()

    def encode(self, text: str, prompt_name: str | None) -> tuple[list[int], FloatArray]:
        """Return token ids (T,) and hidden states (T, D)."""
        del prompt_name
        ids = self._tokenizer(text, truncation=True, max_length=self._max_tokens)["input_ids"]
        batch = torch.tensor([ids])
        with torch.inference_mode():
            output = self._model(input_ids=batch, attention_mask=torch.ones_like(batch))
        return list(ids), output.last_hidden_state[0].numpy()

    def embed(self, text: str, prompt_name: str | None) -> FloatArray | None:
        """Return None: transformers does not define the embedding of a text."""
        del text, prompt_name
        return None


class _SentenceTransformers:
    """`SentenceTransformer` in fp32 on the CPU."""

    def __init__(self, source: str, revision: str | None, max_tokens: int) -> None:
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415 - optional

        self.name = f"sentence-transformers {importlib.metadata.version('sentence-transformers')}"
        self._model: Any = SentenceTransformer(source, device="cpu", revision=revision).float()
        if max_tokens == MAX_TOKENS:  # otherwise its own limit is compared as well
            self._model.max_seq_length = MAX_TOKENS
        self.prompts: dict[str, str] = {name: text for name, text in self._model.prompts.items() if text}

    def encode(self, text: str, prompt_name: str | None) -> tuple[list[int], FloatArray]:
        """Return token ids (T,) and hidden states (T, D)."""
        [values] = self._model.encode([text], output_value=None, **_prompt(prompt_name))
        return values["input_ids"].tolist(), values["token_embeddings"].cpu().numpy()

    def embed(self, text: str, prompt_name: str | None) -> FloatArray | None:
        """Return the final embedding (E,)."""
        vector: FloatArray = self._model.encode([text], **_prompt(prompt_name))[0]
        return vector


class _Pipeline:
    """`TextClassificationPipeline` of transformers in fp32 on the CPU. Its scores are sorted."""

    def __init__(self, source: str, revision: str | None, max_tokens: int) -> None:
        import transformers  # noqa: PLC0415 - optional

        self.name = f"transformers {transformers.__version__}"
        self.prompts: dict[str, str] = {}
        options: dict[str, Any] = {"revision": revision} if revision else {}
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(source, dtype="float32", **options).eval()
        self._length = {"truncation": True, "max_length": max_tokens}
        pipeline: Any = transformers.TextClassificationPipeline
        self._pipeline = pipeline(model=model, tokenizer=tokenizer)
        # Keys of sentence-transformers before version 6.
        keys = ("sentence_transformers", "sbert_ce_default_activation_function")
        self.is_cross_encoder = any(hasattr(model.config, key) for key in keys)

    def score(self, text: TextOrPair, prompt_name: str | None) -> Scored:
        """Return token ids (T,), logits (C,) and scores (C,) in ascending order."""
        del prompt_name
        texts = (text,) if isinstance(text, str) else text
        encoded = self._pipeline.tokenizer(*texts, return_tensors="pt", **self._length)
        with torch.inference_mode():
            logits = self._pipeline.model(**encoded).logits
        scores = [entry["score"] for entry in self._pipeline.postprocess({"logits": logits}, top_k=None)]
        return encoded["input_ids"][0].tolist(), logits[0].numpy(), np.sort(np.array(scores, np.float32))


class _CrossEncoder:
    """`CrossEncoder` of sentence-transformers in fp32 on the CPU."""

    def __init__(self, source: str, revision: str | None, max_tokens: int) -> None:
        from sentence_transformers import CrossEncoder  # noqa: PLC0415 - optional

        self.name = f"sentence-transformers {importlib.metadata.version('sentence-transformers')}"
        self._model: Any = CrossEncoder(source, device="cpu", revision=revision).float()
        if max_tokens == MAX_TOKENS:  # otherwise its own limit is compared as well
            self._model.max_seq_length = MAX_TOKENS
        self.prompts: dict[str, str] = {name: text for name, text in self._model.prompts.items() if text}

    def score(self, text: TextOrPair, prompt_name: str | None) -> Scored:
        """Return token ids (T,), logits (C,) and scores (C,) in ascending order."""
        options = {"prompt": self.prompts[prompt_name] if prompt_name else ""}
        ids = self._model.preprocess([text], **options)["input_ids"][0].tolist()
        logits, scores = (
            np.atleast_1d(self._model.predict([text], activation_fn=activation, **options)[0])
            for activation in (torch.nn.Identity(), None)
        )
        return ids, logits, np.sort(scores)


def _prompt(prompt_name: str | None) -> dict[str, str]:
    """Return the arguments of `SentenceTransformer.encode`; an empty prompt replaces the default one."""
    return {"prompt": ""} if prompt_name is None else {"prompt_name": prompt_name}


def hidden_states_limit(parity: ParityResult) -> float:
    """Return the largest difference of hidden states that passes.

    It is twice the largest limit of the parity grid, one for the bundle and one for the publisher's
    implementation: both are compared with our encoder.
    """
    limits = [found.allowed_error for found in parity.measurements if found.role == HIDDEN_OUTPUT]
    return 2 * max(limits)


def logits_limit(result: LogitsResult) -> float:
    """Return the largest difference of logits that passes, see `hidden_states_limit`."""
    return 2 * max(case.allowed_error for case in result.cases)


def compare_with_publisher(
    embedder: Embedder,
    source: str | Path,
    limit: float,
    progress: StageProgress,
    *,
    revision: str | None = None,
    pooling: PoolingDefaults | None = None,
) -> PublisherResult:
    """Compare a served bundle with the publisher's implementation of its checkpoint.

    Args:
        embedder: The served bundle.
        source: Checkpoint directory or hub id. It runs in sentence-transformers if it has a `modules.json`,
            otherwise in transformers. No code from the checkpoint is executed.
        limit: Largest difference of hidden states that passes. Embeddings may differ by `limit` times the
            larger of 1 and their norm.
        progress: Called before each text.
        revision: Branch, tag or commit on the hub.
        pooling: The bundle's pooling. Embeddings are not compared if it is not the checkpoint's own. None if
            the export replaced nothing.

    Raises:
        SourceError: The implementation is not installed, or cannot load the checkpoint.
    """
    reference, not_compared = _open(source, revision, embedder.max_tokens)
    texts = sample_texts(embedder.max_tokens)
    names: list[str | None] = [None, *reference.prompts]
    compare_embeddings = not _is_replaced(pooling, source)
    if not compare_embeddings:
        not_compared.append("embeddings: the export replaced the pooling or normalization of the checkpoint")
    comparisons = []
    for number, name in enumerate(names):
        progress(reference.name + (f", prompt {name}" if name else ""), number, len(names))
        found = _compare_texts(embedder, reference, texts, name, with_embeddings=compare_embeddings)
        comparisons += list(found.summarize(limit, name))
    progress("", len(names), len(names))
    return PublisherResult(reference.name, tuple(comparisons), tuple(not_compared))


def compare_scores_with_publisher(
    scorer: Scorer,
    source: str | Path,
    limit: float,
    progress: StageProgress,
    *,
    revision: str | None = None,
    is_reranker: bool = False,
) -> PublisherResult:
    """Compare a served classifier or reranker with the publisher's implementation of its checkpoint.

    Args:
        scorer: The served bundle.
        source: Checkpoint directory or hub id. It runs in the `CrossEncoder` of sentence-transformers if its
            files are of this class, otherwise in the text classification pipeline of transformers.
        limit: Largest difference of logits and of scores that passes.
        progress: Called before each prompt.
        revision: Branch, tag or commit on the hub.
        is_reranker: Whether the model has one label. It is compared on pairs, other models also on texts.

    Raises:
        SourceError: The implementation is not installed, or cannot load the checkpoint.
    """
    reference = _open_scorer(source, revision, scorer.max_tokens)
    texts = sample_texts(scorer.max_tokens)
    inputs: list[TextOrPair] = [*itertools.pairwise(texts), *([] if is_reranker else texts)]
    names: list[str | None] = [None, *reference.prompts]
    comparisons = []
    for number, name in enumerate(names):
        progress(reference.name + (f", prompt {name}" if name else ""), number, len(names))
        found = _Differences()
        for text in inputs:
            expected_ids, *expected = reference.score(text, name)
            ids, logits, scores = scorer.score(text, name)
            label = text if isinstance(text, str) else " | ".join(text)
            found.tokens[label] = 0.0 if ids == expected_ids else 1.0
            for result, ours, theirs in zip(
                ("logits", "scores"), (logits, np.sort(scores)), expected, strict=True
            ):
                found.vectors.setdefault(result, {})[label] = max_abs_difference(ours, theirs)
        comparisons += list(found.summarize(limit, name))
    progress("", len(names), len(names))
    return PublisherResult(reference.name, tuple(comparisons))


def sample_texts(max_tokens: int) -> list[str]:
    """Return texts of five kinds, one with capitals and accents, and one of more than `max_tokens` tokens."""
    kinds = read_kinds(None)
    texts = [text for lines in kinds.values() for text in [line for line in lines if line][:TEXTS_PER_KIND]]
    words = " ".join(kinds["sentences"]).split()
    long_text = " ".join(words[index % len(words)] for index in range(max_tokens + 50))
    return [CASED_TEXT, *texts, long_text]


def _open(
    source: str | Path, revision: str | None, max_tokens: int
) -> tuple[_Transformers | _SentenceTransformers, list[str]]:
    """Load the publisher's implementation. Also return the results that cannot be compared."""
    if _has_modules(source, revision):
        return _load(_SentenceTransformers, source, revision, max_tokens), []
    without = ["embeddings: the checkpoint has no sentence-transformers modules"]
    return _load(_Transformers, source, revision, max_tokens), without


def _load(
    kind: Callable[[str, str | None, int], _Reference],
    source: str | Path,
    revision: str | None,
    max_tokens: int,
) -> _Reference:
    try:
        _silence_transformers()
        return kind(str(source), revision, max_tokens)
    except ImportError as error:
        name = (error.name or "").partition(".")[0].replace("_", "-")
        raise SourceError(f"--against transformers needs the package {name}: pip install {name}") from error
    except Exception as error:  # invalid files can raise any exception in these libraries
        reason = " ".join(str(error).split())[:300]
        raise SourceError(
            f"transformers cannot load {source}, or not without running its code, so a comparison is not "
            f"possible ({type(error).__name__}: {reason}): omit --against"
        ) from error


def _open_scorer(source: str | Path, revision: str | None, max_tokens: int) -> _CrossEncoder | _Pipeline:
    if not _has_modules(source, revision):
        pipeline = _load(_Pipeline, source, revision, max_tokens)
        if not pipeline.is_cross_encoder:
            return pipeline
    return _load(_CrossEncoder, source, revision, max_tokens)


def _is_replaced(pooling: PoolingDefaults | None, source: str | Path) -> bool:
    """Return whether the export replaced the pooling or normalization of a local checkpoint."""
    if pooling is None or not (Path(source) / "modules.json").is_file():
        return False
    published = read_pooling(Path(source), pooling.dense[0].in_features if pooling.dense else 0)
    return (published.pooling, published.normalize) != (pooling.pooling, pooling.normalize)


def _silence_transformers() -> None:
    """Disable the progress bars of transformers, and its warnings about unused weights."""
    from transformers.utils import logging  # noqa: PLC0415 - optional

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _has_modules(source: str | Path, revision: str | None) -> bool:
    if Path(source).is_dir():
        return (Path(source) / "modules.json").is_file()
    from huggingface_hub import file_exists  # noqa: PLC0415 - for hub ids only

    return bool(file_exists(str(source), "modules.json", revision=revision))


@dataclass
class _Differences:
    """Errors per text: of token ids, and of vectors by kind of result."""

    tokens: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, dict[str, float]] = field(default_factory=dict)

    def summarize(self, limit: float, prompt_name: str | None) -> Iterator[Comparison]:
        """Yield a comparison per kind of result."""
        suffix = f" (prompt {prompt_name})" if prompt_name else ""
        yield Comparison(
            f"token ids{suffix}", len(self.tokens), sum(self.tokens.values()), 0, _worst(self.tokens)
        )
        for result, errors in self.vectors.items():
            worst = _worst(errors)
            yield Comparison(f"{result}{suffix}", len(errors), errors.get(worst, float("nan")), limit, worst)


def _worst(errors: dict[str, float]) -> str:
    return max(errors, key=lambda text: np.nan_to_num(errors[text], nan=np.inf), default="")


def _compare_texts(
    embedder: Embedder,
    reference: _Transformers | _SentenceTransformers,
    texts: Sequence[str],
    prompt_name: str | None,
    *,
    with_embeddings: bool,
) -> _Differences:
    hidden_states: dict[str, float] = {}
    embeddings: dict[str, float] = {}
    found = _Differences(vectors={"hidden states": hidden_states})
    for text in texts:
        expected_ids, expected_states = reference.encode(text, prompt_name)
        ids, states = embedder.encode(text, prompt_name)
        found.tokens[text] = 0.0 if ids == expected_ids else 1.0
        if ids == expected_ids:
            hidden_states[text] = max_abs_difference(states, expected_states)
        expected = reference.embed(text, prompt_name) if with_embeddings else None
        if expected is not None:
            scale = max(1.0, float(np.linalg.norm(expected)))
            embeddings[text] = max_abs_difference(embedder.embed(text, prompt_name), expected) / scale
    if embeddings:
        found.vectors["embeddings"] = embeddings
    return found
