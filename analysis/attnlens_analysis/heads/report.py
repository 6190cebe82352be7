"""Runs all measurements on the heads of a bundle and collects them in a report."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.copies import CopyTest, measure_copies
from attnlens_analysis.heads.coreference import Coreference, measure_coreference
from attnlens_analysis.heads.distances import MIN_CONTENT_TOKENS, Distances, DistanceSums
from attnlens_analysis.heads.importance import (
    NUM_TEXTS,
    Importance,
    ScoredPair,
    TaskEffect,
    measure_importance,
    measure_task,
    open_contributions,
    spread,
)
from attnlens_analysis.heads.labels import LabeledHead, label_heads
from attnlens_analysis.heads.maps import EncodedText, Head, MapSource, Progress, TextMaps
from attnlens_analysis.heads.patterns import MIN_TOKENS, Patterns, PatternSums
from attnlens_analysis.heads.relatedness import Relatedness, measure_relatedness
from attnlens_analysis.heads.syntax import RelationScore, SyntaxCounts
from attnlens_analysis.heads.tied import TiedDiagonal, measure_tied
from attnlens_analysis.heads.treebank import Corpus, Sentence
from attnlens_analysis.heads.words import NO_WORD, word_level, words_of_tokens
from attnlens_server.bundle import Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """Measurements of all heads of a model.

    Attributes:
        model_name: Model name.
        model_version: SHA-256 of the bundle's manifest.
        corpus_name: Name of the corpus.
        corpus_license: License of the corpus. Empty if unknown.
        num_sentences: Number of measured sentences.
        heads: The N heads, in the order of all per-head values.
        patterns: Attention by position.
        copies: Repeated random tokens. None if the model supports too few tokens.
        syntax: Best head for each relation. None if the corpus is not a treebank.
        distances: Attention to near and distant tokens. None if all texts are too short.
        coreference: Attention from pronouns to antecedents. None if no test sentence fits the model.
        relatedness: Attention to synonyms and repeated words. None if no test sentence fits the model.
        tied: Diagonal attention with tied projections. None if the graph does not support it.
        importance: Importance of each head. None if the bundle lacks the contributions graph.
        task: Effect of each head on a task. None if not requested or the bundle lacks the graph.
        labeled: Heads with at least one label.
        notes: What was skipped, and why.
    """

    model_name: str
    model_version: str
    corpus_name: str
    corpus_license: str
    num_sentences: int
    heads: tuple[Head, ...]
    patterns: Patterns
    copies: CopyTest | None
    syntax: tuple[RelationScore, ...] | None
    distances: Distances | None
    coreference: Coreference | None
    relatedness: Relatedness | None
    tied: TiedDiagonal | None
    importance: Importance | None
    task: TaskEffect | None
    labeled: tuple[LabeledHead, ...]
    notes: tuple[str, ...]

    def labels_of(self, head: Head) -> tuple[str, ...]:
        """Return the labels of a head, possibly none."""
        return next((labeled.labels for labeled in self.labeled if labeled.head == head), ())


class TooShortError(Exception):
    """All texts are too short to be measured."""


def measure_heads(
    bundle: Bundle,
    corpus: Corpus,
    progress: Progress,
    *,
    num_importance_texts: int = NUM_TEXTS,
    pairs: Sequence[ScoredPair] = (),
    threads: int = 0,
) -> HeadReport:
    """Run all measurements that the bundle and the corpus support.

    Args:
        bundle: Bundle of the model.
        corpus: Texts to measure on. Syntax is measured only on treebanks.
        progress: Called with the progress of each stage.
        num_importance_texts: Number of evenly spaced texts to run without each head. 0 skips head importance.
        pairs: Scored text pairs for measuring the effect of each head on a task. If empty, this is skipped.
        threads: Number of ONNX Runtime threads. 0 uses the default of ONNX Runtime.

    Raises:
        StartupError: The bundle has no tokenizer or attention weights, or a graph cannot be opened.
        TooShortError: No text has at least `MIN_TOKENS` tokens.
    """
    source = MapSource(bundle, threads)
    kept, num_long = _encode(source, corpus)
    long_enough = [text for _, text in kept if len(text.input_ids) >= MIN_TOKENS]
    if not long_enough:
        raise TooShortError(f"no text of {corpus.name} has at least {MIN_TOKENS} tokens. Use longer texts.")
    patterns, distances, syntax = _measure_maps(source, corpus, kept, progress)
    copies = measure_copies(source, progress)
    coreference, relatedness = measure_coreference(source, progress), measure_relatedness(source, progress)
    tied = measure_tied(source, long_enough, progress)
    run = open_contributions(bundle, threads)
    sample = spread(long_enough, num_importance_texts)
    notes = [
        *source.notes,
        *_notes(num_long, bundle, copies, tied, has_gates=run is not None),
        *_test_notes(distances, coreference, relatedness),
    ]
    return HeadReport(
        model_name=bundle.model.name,
        model_version=bundle.model.version,
        corpus_name=corpus.name,
        corpus_license=corpus.license,
        num_sentences=len(kept),
        heads=source.heads,
        patterns=patterns,
        copies=copies,
        syntax=syntax,
        distances=distances,
        coreference=coreference,
        relatedness=relatedness,
        tied=tied,
        importance=measure_importance(run, source, sample, progress) if run and sample else None,
        task=measure_task(run, source, pairs, progress) if run and pairs else None,
        labeled=label_heads(
            source.heads, patterns, copies, syntax or (), distances, coreference, relatedness
        ),
        notes=tuple(notes),
    )


def _encode(source: MapSource, corpus: Corpus) -> tuple[list[tuple[int, EncodedText]], int]:
    """Return the index and tokens of each usable sentence, and the number of sentences that are too long."""
    encoded = source.encode([sentence.text for sentence in corpus.sentences])
    kept = [(index, text) for index, text in enumerate(encoded) if text is not None]
    return kept, len(encoded) - len(kept)


def _measure_maps(
    source: MapSource, corpus: Corpus, kept: Sequence[tuple[int, EncodedText]], progress: Progress
) -> tuple[Patterns, Distances | None, tuple[RelationScore, ...] | None]:
    """Measure patterns, distances and syntax in one pass over the texts."""
    sums, distances, counts = PatternSums(len(source.heads)), DistanceSums(), SyntaxCounts(source.heads)
    for done, (position, maps) in enumerate(source.of_texts([text for _, text in kept]), start=1):
        index = kept[position][0]
        sentence = corpus.sentences[index]
        forms = [word.form for word in sentence.words or ()]
        token_words = words_of_tokens(forms, maps.tokens.chars) if forms else None
        if len(maps.tokens.ids) >= MIN_TOKENS:
            sums.add(maps, punctuation(sentence, maps, token_words))
            distances.add(maps)
        if sentence.words and token_words is not None:
            weights = word_level(maps.weights, token_words, len(sentence.words))
            has_tokens = np.isin(np.arange(len(sentence.words)), token_words)
            counts.add(weights, sentence.words, has_tokens, scores=index % 2 == 1)
        progress("attention weights", done, len(kept))
    return sums.means(), distances.means(), counts.scores() if corpus.is_treebank else None


def punctuation(
    sentence: Sentence, maps: TextMaps, token_words: npt.NDArray[np.intp] | None
) -> npt.NDArray[np.bool_]:
    """Return which tokens are punctuation, (T,).

    In a treebank, these are the tokens of words tagged PUNCT. Otherwise, these are tokens that consist of
    characters in the Unicode categories P*.
    """
    if sentence.words is not None and token_words is not None:
        is_mark = [word.upos == "PUNCT" for word in sentence.words]
        return np.array([word != NO_WORD and is_mark[word] for word in token_words])
    spans = [sentence.text[start:end] for start, end in maps.tokens.chars]
    return np.array(
        [bool(span) and all(unicodedata.category(letter)[0] == "P" for letter in span) for span in spans]
    )


def _notes(
    num_long: int, bundle: Bundle, copies: CopyTest | None, tied: TiedDiagonal | None, *, has_gates: bool
) -> list[str]:
    notes = list(tied.notes) if tied else []
    if num_long:
        notes.append(f"Texts skipped because they exceed {bundle.model.max_tokens} tokens: {num_long}.")
    if copies is None:
        notes.append("Repeated random tokens were not tested: the model supports too few tokens.")
    if tied is None:
        notes.append(
            "Tied queries and keys were not tested: no layer has query and key weights of the same size."
        )
    if not has_gates:
        notes.append(
            "Head importance was not measured: the bundle has no contributions graph. Export the model again."
        )
    if bundle.model.default_prompt_name:
        notes.append(f"Texts were measured without the default prompt {bundle.model.default_prompt_name!r}.")
    return notes


def _test_notes(
    distances: Distances | None, coreference: Coreference | None, relatedness: Relatedness | None
) -> list[str]:
    notes = []
    if distances is None:
        notes.append(
            "Near and distant tokens were not compared: no text has at least "
            f"{MIN_CONTENT_TOKENS} tokens without special tokens."
        )
    if coreference is None:
        notes.append("Pronouns were not tested: the model supports too few tokens.")
    if relatedness is None:
        notes.append("Related words were not tested: the model supports too few tokens.")
    return notes
