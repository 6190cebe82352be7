"""Reads a bundle as a server does: texts to token ids, hidden states, embeddings, logits and scores.

Shape legend: T tokens, D hidden size, E embedding size, C labels.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from attnlens.classifiers import ScoreActivation, scores_of
from attnlens.dense import open_layers
from attnlens.pooling import FloatArray, Pooling, finish, pool
from attnlens_export.graph.names import (
    HIDDEN_OUTPUT,
    LOGITS_OUTPUT,
    MODEL_PATH,
    embeddings_path,
    input_names,
)
from attnlens_export.judge.compare import Facts
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.sessions import Graph
from attnlens_export.published.classifier import read_stored_classifier
from attnlens_export.published.pooling import read_pooling
from attnlens_export.published.prompts import read_prompts, read_similarity
from attnlens_export.published.side_files import read_max_tokens
from attnlens_export.tokenizer.pairs import takes_pairs
from attnlens_export.tokenizer.read import BundleTokenizer
from attnlens_model import EncoderConfig
from attnlens_publisher.reference import Arguments, Arrays, Probe


class BundleReader:
    """A bundle that is being exported.

    Implements `attnlens_export.judge.compare.Subject`.

    Args:
        directory: Bundle directory with a tokenizer. It needs no manifest.
        config: Configuration of the encoder.
    """

    def __init__(self, directory: Path, config: EncoderConfig) -> None:
        self._directory, self._config = directory, config
        self._pooling = read_pooling(directory, config.vector_size)
        self._classifier = read_stored_classifier(directory)
        prompts = read_prompts(directory)
        self.facts = Facts(
            prompts.texts,
            prompts.default_name,
            None if self._classifier is None else tuple(self._classifier.labels),
            takes_pairs(directory, config),
            "token_type_ids" in input_names(config),
            read_similarity(directory),
        )
        self._tokenizer = BundleTokenizer(directory / "tokenizer.json", read_max_tokens(directory, config))

    def tokenize(self, probe: Probe) -> Arrays:
        """Return `ids` and `types`, (T,), of a text or pair with its prompt."""
        text = probe.text if isinstance(probe.text, str) else (probe.text[0], probe.text[1])
        [encoding] = self._tokenizer.encode([text], self.facts.prompt(probe.arguments))
        return {"ids": np.array(encoding.ids, np.int64), "types": np.array(encoding.type_ids, np.int64)}

    def run(self, probes: Sequence[Probe]) -> Iterator[Arrays]:
        """Yield `hidden` (T, D) and `result`: the embedding (E,), or the logits (C,) with the `scores` (C,).

        The token ids and types are those of the probe. Only one graph is open at a time.
        """
        graph = Graph(self._directory, embeddings_path(self._directory))
        found = [graph.run(self._inputs(probe))[HIDDEN_OUTPUT][0] for probe in probes]
        del graph
        if self._classifier is None:
            dense = open_layers(self._directory, self._pooling.dense, self._config.vector_size)
            for probe, hidden in zip(probes, found, strict=True):
                pooled = pool(hidden, Pooling(self._pooling.pooling), self._num_excluded(probe.arguments))
                [embedding] = finish(
                    pooled[None],
                    dense,
                    dimensions=self._pooling.truncate_dim or None,
                    normalize_first=self._pooling.normalize,
                )
                yield {"hidden": hidden, "result": embedding}
            return
        activation = ScoreActivation(self._classifier.activation)
        graph = Graph(self._directory, MODEL_PATH)
        for probe, hidden in zip(probes, found, strict=True):
            logits: FloatArray = graph.run(self._inputs(probe))[LOGITS_OUTPUT][0]
            yield {"hidden": hidden, "result": logits, "scores": scores_of(logits, activation)}

    def _inputs(self, probe: Probe) -> Inputs:
        ids = probe.arrays["ids"][None]
        types = probe.arrays["types"][None] if self.facts.has_types else None
        return Inputs(ids, np.ones_like(ids), types)

    def _num_excluded(self, arguments: Arguments) -> int:
        """Return the number of leading tokens that pooling excludes, counted like a server."""
        prompt = self.facts.prompt(arguments)
        if not prompt or not self._pooling.exclude_prompt:
            return 0
        return self._tokenizer.num_prompt_tokens(prompt)
