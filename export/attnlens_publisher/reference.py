"""Results of the publisher's own pipeline for a checkpoint: token ids, hidden states, embeddings and scores.

The pipeline is a `SentenceTransformer`, a `CrossEncoder`, or a model and a tokenizer of transformers.

Shape legend: T tokens, D hidden size, E embedding size, C labels.
"""

import functools
import importlib.metadata
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnlens_publisher.errors import RefusedError
from attnlens_publisher.process import Report

TextOrPair: TypeAlias = str | Sequence[str]
Arguments: TypeAlias = Mapping[str, str]
"""Arguments of `SentenceTransformer.encode`: empty, `prompt_name` or `prompt`."""
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

NO_PROMPT: Arguments = {"prompt": ""}
MAX_SINGLE_TOKENS = 64
"""Maximum number of added tokens that are each compared inside a sentence. All are compared in long texts."""
_MAX_SPECIAL_VECTORS = 4
_DESCRIBED = ("text", "arguments", "has_vectors")
_TOKENS_PER_TEXT = 24
TEXTS = (
    "The NASA engineers in Zürich and São Paulo read Dr. O'Brien's REPORT twice.",
    " leading space,  two spaces\tand a tab\ninside ",
    "Éclair façade coöperate Ångström ẞtraße İstanbul e\u0301",
    "今天天气非常好。東京タワーへ行きました。",
    "مرحبا بالعالم، שלום עולם!",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 said \U0001f44d\U0001f3fd to \U0001f3f3\ufe0f :-)",
    "",
)
"""Texts whose tokens depend on settings: case, white space, accents, scripts without spaces, emoji."""


@dataclass
class Probe:
    """A text, or a pair of texts, and its results.

    Attributes:
        text: Text or pair.
        arguments: Arguments that select a prompt.
        has_vectors: Whether more than the tokens is computed.
        arrays: `ids` and `types`, (T,), and unless only tokens are compared: `hidden`, (T, D), and `result`,
            the embedding (E,) or the logits (C,), with the `scores` (C,). Embeddings without arguments also
            have the `similarity` (1,) with the first of them.
    """

    text: TextOrPair
    arguments: Arguments = field(default_factory=dict)
    has_vectors: bool = True
    arrays: Arrays = field(default_factory=dict)


class Pipeline(ABC):
    """A published checkpoint in fp32 on the CPU.

    Attributes:
        library: Package name.
        model: The model of transformers.
        tokenizer: The tokenizer of transformers.
        prompts: Prompts that are not empty, by name.
        default_prompt: Name of the default prompt, or an empty string.
        max_tokens: Maximum input length in tokens, at most that of the encoder.
        similarity: Name of the similarity function, or an empty string.
    """

    library = "transformers"
    similarity = ""
    default_prompt = ""
    scores_texts = False

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int) -> None:  # noqa: ANN401 - no stubs
        self.model, self.tokenizer, self.max_tokens = model, tokenizer, max_tokens
        self.prompts: dict[str, str] = {}

    @abstractmethod
    def tokenize(self, text: TextOrPair, arguments: Arguments) -> Mapping[str, Any]:
        """Return the inputs of the model for one text or pair, with truncation."""

    @abstractmethod
    def run(self, text: TextOrPair, arguments: Arguments) -> Arrays:
        """Return `hidden`, and `result` and `scores` if the pipeline defines them."""

    def compare(self, results: Sequence[Arrays]) -> None:
        """Add the `similarity` (1,) of each result with the first one, if the pipeline defines it."""
        del results

    @property
    def labels(self) -> list[str]:
        """Names of the labels in the order of the logits."""
        config = self.model.config
        return [str(config.id2label[index]) for index in range(config.num_labels)]

    @contextmanager
    def recorded(self) -> Iterator[list[Any]]:
        """Yield a list to which each call of the encoder appends its last hidden states (1, T, D)."""
        found: list[Any] = []
        hook = self.model.base_model.register_forward_hook(
            lambda _module, _args, output: found.append(output[0]), always_call=False
        )
        try:
            yield found
        finally:
            hook.remove()


class _Encoder(Pipeline):
    """`AutoTokenizer` and `AutoModel`, or the encoder half of an encoder-decoder."""

    def __init__(self, source: str, max_tokens: int) -> None:
        import transformers  # noqa: PLC0415

        model = self.choose_class(source).from_pretrained(source, dtype="float32").eval()
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
        super().__init__(model, tokenizer, min(max_tokens, tokenizer.model_max_length))

    def choose_class(self, source: str) -> Any:  # noqa: ANN401 - a class of transformers
        """Return the class that loads the model. T5 has one for its encoder alone."""
        import transformers  # noqa: PLC0415

        is_known = type(transformers.AutoConfig.from_pretrained(source)) in (
            transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
        )
        return transformers.AutoModelForTextEncoding if is_known else transformers.AutoModel

    def tokenize(self, text: TextOrPair, arguments: Arguments) -> Mapping[str, Any]:
        """Return the inputs of the model. There are no prompts."""
        del arguments
        # Lists, because a call for one pair ignores an empty second text.
        columns = [[part] for part in ((text,) if isinstance(text, str) else text)]
        return dict(
            self.tokenizer(*columns, truncation=True, max_length=self.max_tokens, return_tensors="pt")
        )

    def run(self, text: TextOrPair, arguments: Arguments) -> Arrays:
        """Return the hidden states."""
        output = self.model(**self.tokenize(text, arguments))
        return {"hidden": output.last_hidden_state[0].numpy()}


class _Classifier(_Encoder):
    """`TextClassificationPipeline` of transformers. Its scores are sorted."""

    scores_texts = True

    def __init__(self, source: str, max_tokens: int) -> None:
        super().__init__(source, max_tokens)
        import transformers  # noqa: PLC0415 - imported by the worker

        pipeline: Any = transformers.TextClassificationPipeline
        self._pipeline = pipeline(model=self.model, tokenizer=self.tokenizer, device="cpu")

    def choose_class(self, source: str) -> Any:  # noqa: ANN401 - a class of transformers
        """Return the class that loads the model with its head."""
        del source
        import transformers  # noqa: PLC0415

        return transformers.AutoModelForSequenceClassification

    def run(self, text: TextOrPair, arguments: Arguments) -> Arrays:
        """Return hidden states, logits and scores."""
        with self.recorded() as found:
            logits = self.model(**self.tokenize(text, arguments)).logits
        entries = self._pipeline.postprocess({"logits": logits}, top_k=None)
        scores = np.empty(len(entries), np.float32)
        # They may be sorted. All functions from logits to scores keep the order.
        by_rank = sorted((entry["score"] for entry in entries), reverse=True)
        scores[np.argsort(-logits[0].numpy(), kind="stable")] = by_rank
        return {"hidden": found[0][0].numpy(), "result": logits[0].numpy(), "scores": scores}


class _WithModules(Pipeline):
    """A model of sentence-transformers."""

    library = "sentence-transformers"

    def __init__(self, kind: str, source: str, max_tokens: int) -> None:
        import sentence_transformers  # noqa: PLC0415 - imported by the worker
        from transformers import PreTrainedModel  # noqa: PLC0415

        self.modules: Any = getattr(sentence_transformers, kind)(
            source, device="cpu", trust_remote_code=False, local_files_only=True
        ).float()
        model = next(module for module in self.modules.modules() if isinstance(module, PreTrainedModel))
        limit = self.modules.max_seq_length
        if limit is None or limit > max_tokens:
            limit = self.modules.max_seq_length = max_tokens
        super().__init__(model, self.modules.tokenizer, limit)
        self.prompts = {name: text for name, text in self.modules.prompts.items() if text}
        self.default_prompt = self.modules.default_prompt_name or ""

    def choose_prompts(self, prompts: Mapping[str, str], default_prompt: str | None) -> None:
        """Replace or add prompts, and replace the default prompt unless it is None."""
        self.modules.prompts |= prompts
        self.prompts |= {name: text for name, text in prompts.items() if text}
        if default_prompt is not None:
            self.default_prompt = default_prompt
            self.modules.default_prompt_name = default_prompt or None

    def tokenize(self, text: TextOrPair, arguments: Arguments) -> Mapping[str, Any]:
        """Return the inputs of the model."""
        prompt = arguments.get("prompt")
        if prompt is None:
            prompt = self.modules.prompts.get(arguments.get("prompt_name", self.default_prompt))
        features: Mapping[str, Any] = self.modules.preprocess([text], prompt=prompt)
        return features


class _SentenceTransformer(_WithModules):
    """`SentenceTransformer`."""

    def __init__(self, source: str, max_tokens: int) -> None:
        super().__init__("SentenceTransformer", source, max_tokens)
        self.similarity = str(self.modules.similarity_fn_name)

    def run(self, text: TextOrPair, arguments: Arguments) -> Arrays:
        """Return hidden states and embedding."""
        [values] = self.modules.encode([text], output_value=None, show_progress_bar=False, **arguments)
        return {
            "hidden": values["token_embeddings"].numpy(),
            "result": values["sentence_embedding"].numpy(),
        }

    def compare(self, results: Sequence[Arrays]) -> None:
        """Add the `similarity` (1,) of each embedding with the first one."""
        for arrays in results:
            found = self.modules.similarity(results[0]["result"], arrays["result"])
            arrays["similarity"] = found[0].numpy()


class _CrossEncoder(_WithModules):
    """`CrossEncoder`."""

    scores_texts = True

    def __init__(self, source: str, max_tokens: int) -> None:
        super().__init__("CrossEncoder", source, max_tokens)

    def run(self, text: TextOrPair, arguments: Arguments) -> Arrays:
        """Return hidden states, logits and scores."""
        options = {"show_progress_bar": False, **arguments}
        with self.recorded() as found:
            [logits] = self.modules.predict([text], activation_fn=torch.nn.Identity(), **options)
            [scores] = self.modules.predict([text], **options)
        return {
            "hidden": found[0][0].numpy(),
            "result": np.atleast_1d(logits),
            "scores": np.atleast_1d(scores),
        }


_CROSS_ENCODER_KEYS = ("sentence_transformers", "sbert_ce_default_activation_function")


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def needs_modules(source: str) -> bool:
    """Return whether sentence-transformers saved a checkpoint."""
    directory = Path(source)
    if (directory / "modules.json").is_file():
        return True
    published = _read(directory / "config_sentence_transformers.json")
    config = _read(directory / "config.json")
    return published.get("model_type") == "CrossEncoder" or any(key in config for key in _CROSS_ENCODER_KEYS)


def open_pipeline(source: str, kind: str, max_tokens: int) -> Pipeline:
    """Load the pipeline that computes the final result of a checkpoint.

    Args:
        source: Checkpoint directory.
        kind: "embedder", "scorer", or "encoder" for an encoder without the rest of its checkpoint.
        max_tokens: Maximum input length of the encoder.

    Raises:
        RefusedError: transformers does not know the model type.
        ImportError: sentence-transformers is needed, but not installed.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415

    model_type = _read(Path(source) / "config.json").get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise RefusedError(f"transformers has no model type {model_type!r}")
    if kind == "scorer":
        return _CrossEncoder(source, max_tokens) if needs_modules(source) else _Classifier(source, max_tokens)
    if kind == "embedder" and (Path(source) / "modules.json").is_file():
        return _SentenceTransformer(source, max_tokens)
    return _Encoder(source, max_tokens)


def compute(
    report: Report,
    *,
    source: str,
    kind: str,
    texts: Sequence[str],
    max_tokens: int,
    vector_tokens: int,
    prompts: Mapping[str, str],
    default_prompt: str | None,
    num_global_tokens: int | None,
    takes_pairs: bool,
    output: str,
) -> dict[str, Any]:
    """Run a published checkpoint on texts that depend on every setting of its tokenizer.

    Args:
        report: Called before each text.
        source: Checkpoint directory.
        kind: See `open_pipeline`.
        texts: Further texts. Their words also become the long texts.
        max_tokens: Maximum input length of the encoder.
        vector_tokens: Maximum length of a text whose vectors are computed.
        prompts: Prompts by name that replace or extend those of the checkpoint.
        default_prompt: Name of the default prompt, if it is not that of the checkpoint.
        num_global_tokens: Number of global tokens of a Longformer, if it is not that of the checkpoint.
        takes_pairs: Whether the tokens of pairs are compared.
        output: File to write: `INDEX.NAME` for each array of each probe, as `.npz`.

    Returns:
        The pipeline's `library`, `versions`, `max_tokens`, `prompts`, `default_prompt`, `similarity` and
        `labels` (None if it computes no scores), and the `probes` without their arrays.
    """
    pipeline = open_pipeline(source, kind, max_tokens)
    if isinstance(pipeline, _WithModules):
        pipeline.choose_prompts(prompts, default_prompt)
    if num_global_tokens is not None:
        _make_global(pipeline.model.base_model, num_global_tokens)
    probes = list(_make_probes(pipeline, texts, vector_tokens, takes_pairs=takes_pairs))
    _run(pipeline, probes, vector_tokens, report)
    pipeline.compare([probe.arrays for probe in probes if probe.has_vectors and not probe.arguments])
    arrays: Any = {
        f"{index}.{name}": array for index, probe in enumerate(probes) for name, array in probe.arrays.items()
    }
    np.savez(output, **arrays)
    return {
        "library": pipeline.library,
        "versions": {name: importlib.metadata.version(name) for name in {pipeline.library, "transformers"}},
        "max_tokens": pipeline.max_tokens,
        "prompts": pipeline.prompts,
        "default_prompt": pipeline.default_prompt,
        "similarity": pipeline.similarity,
        "labels": pipeline.labels if pipeline.scores_texts else None,
        "probes": [{key: getattr(probe, key) for key in _DESCRIBED} for probe in probes],
    }


def _run(pipeline: Pipeline, probes: Sequence[Probe], vector_tokens: int, report: Report) -> None:
    """Add the results to the probes."""
    with torch.inference_mode():
        for index, probe in enumerate(probes):
            report(pipeline.library, index, len(probes))
            probe.arrays = _tokens(pipeline, probe)
        # The longest first: BigBird of transformers does not return from full attention to blocks.
        for probe in sorted(probes, key=lambda probe: -len(probe.arrays["ids"])):
            length = len(probe.arrays["ids"])
            probe.has_vectors &= 0 < length <= vector_tokens and _has_rows(pipeline, probe)
            if probe.has_vectors:
                probe.arrays |= pipeline.run(probe.text, probe.arguments)


def _make_global(encoder: Any, count: int) -> None:  # noqa: ANN401 - a module
    """Make the first tokens of every text global."""
    forward = encoder.forward

    @functools.wraps(forward)  # sentence-transformers reads its signature, and calls it without hooks
    def with_mask(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any arguments
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = torch.zeros_like(ids)
        mask[:, :count] = 1
        return forward(*args, **kwargs, global_attention_mask=mask)

    encoder.forward = with_mask


def _tokens(pipeline: Pipeline, probe: Probe) -> Arrays:
    inputs = pipeline.tokenize(probe.text, probe.arguments)
    ids = inputs["input_ids"][0].numpy()
    types = inputs.get("token_type_ids")
    return {
        "ids": ids.astype(np.int64),
        "types": np.zeros(len(ids), np.int64) if types is None else types[0].numpy(),
    }


def _has_rows(pipeline: Pipeline, probe: Probe) -> bool:
    """Return whether the encoder has an embedding of every token."""
    num_rows: int = pipeline.model.get_input_embeddings().num_embeddings
    return int(probe.arrays["ids"].max()) < num_rows


def _make_probes(
    pipeline: Pipeline, texts: Sequence[str], vector_tokens: int, *, takes_pairs: bool
) -> Iterator[Probe]:
    """Yield all probes: texts, pairs, long texts, added tokens, then each prompt."""
    singles: list[TextOrPair] = [*TEXTS, *texts]
    pairs: list[TextOrPair] = [
        [texts[0], texts[1]], [TEXTS[0], TEXTS[1]], [TEXTS[3], ""], ["", texts[0]],
        *([TEXTS[0], text] for text in texts[2:]),
    ]  # fmt: skip
    words = " ".join(texts).split()
    if pipeline.scores_texts and (len(pipeline.labels) == 1 or pipeline.library != "transformers"):
        inputs, long = pairs, _long_pairs(words, pipeline.max_tokens)
    else:
        inputs = [*singles, *(pairs if pipeline.scores_texts and takes_pairs else ())]
        long = list(_long_texts(pipeline, words, vector_tokens))
    yield from map(Probe, inputs)
    yield from map(Probe, long)
    if takes_pairs and pipeline.library == "transformers" and not pipeline.scores_texts:
        yield from (Probe(pair, has_vectors=False) for pair in pairs)
    join = (lambda text: [text, text]) if inputs is pairs else (lambda text: text)
    yield from _added_tokens(pipeline, join)
    few = inputs[:2]
    for name in pipeline.prompts:
        yield from (Probe(text, {"prompt_name": name}) for text in few)
    if pipeline.default_prompt:
        yield from (Probe(text, NO_PROMPT) for text in few)


def _long_texts(pipeline: Pipeline, words: Sequence[str], vector_tokens: int) -> Iterator[str]:
    """Yield the longest text within the limit, the next one, and the longest whose vectors are computed."""

    def join(count: int) -> str:
        return " ".join(words[index % len(words)] for index in range(count))

    prompt = pipeline.prompts.get(pipeline.default_prompt, "")

    def count_tokens(text: str) -> int:
        return len(pipeline.tokenizer(prompt + text)["input_ids"])

    # Tokens of a chat template.
    added = pipeline.tokenize(words[0], {})["input_ids"].shape[-1] - count_tokens(words[0])

    def find(limit: int) -> int:
        """Return the largest number of words that have at most `limit` tokens."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if count_tokens(join(middle)) + added <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    count = find(pipeline.max_tokens)
    yield from (join(count), join(count + 1), join(2 * count + 2))
    if pipeline.max_tokens > vector_tokens:
        yield join(find(vector_tokens))


def _long_pairs(words: Sequence[str], max_tokens: int) -> list[TextOrPair]:
    """Return pairs in which the first text, the second, or both are too long."""
    text = " ".join(words[index % len(words)] for index in range(max_tokens + 1))
    return [[text, words[0]], [words[0], text], [text, text]]


def _added_tokens(pipeline: Pipeline, join: Callable[[str], TextOrPair]) -> Iterator[Probe]:
    """Yield sentences with added and special tokens, then texts with all of them."""
    added = [token.content for _, token in sorted(pipeline.tokenizer.added_tokens_decoder.items())]
    special = set(pipeline.tokenizer.all_special_tokens)
    chosen = added
    if len(added) > MAX_SINGLE_TOKENS:
        steps = np.linspace(0, len(added) - 1, MAX_SINGLE_TOKENS).round().astype(int)
        chosen = [added[step] for step in steps]
    # RoBERTa of transformers counts no position for a padding token inside a text.
    special.discard(pipeline.tokenizer.pad_token)
    with_vectors = [token for token in chosen if token in special][:_MAX_SPECIAL_VECTORS]
    for token in chosen:
        text = f"One {token} two,three{token}four {token.upper()}."
        yield Probe(join(text), has_vectors=token in with_vectors)
    size = max(1, min(_TOKENS_PER_TEXT, pipeline.max_tokens // 3))
    for start in range(0, len(added), size):
        yield Probe(join(" ".join(added[start : start + size])), has_vectors=False)
