"""The report on a bundle's heads, and the run that measures it. The other modules of the folder measure."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.copies import CopyTest, measure_copies
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
from attnlens_analysis.heads.labels import Labelled, label_heads
from attnlens_analysis.heads.maps import EncodedText, Head, MapSource, Progress, TextMaps
from attnlens_analysis.heads.patterns import MIN_TOKENS, Patterns, PatternSums
from attnlens_analysis.heads.syntax import RelationScore, SyntaxCounts
from attnlens_analysis.heads.tied import TiedDiagonal, measure_tied
from attnlens_analysis.heads.treebank import Corpus, Sentence
from attnlens_analysis.heads.words import NO_WORD, word_level, words_of_tokens
from attnlens_server.bundle import Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadReport:
    """What every head of a model does, as far as it was measured.

    Attributes:
        model_name: of the bundle.
        bundle_sha256: of the bundle's manifest.
        corpus_name: what was measured on.
        corpus_licence: of these texts; empty: unknown.
        num_sentences: that were measured.
        heads: N heads, in the order of all values.
        patterns: where attention goes by place.
        copies: the test on repeated random tokens; None: the model takes too few tokens.
        syntax: the best head for each relation; None: the corpus is no treebank.
        tied: the test of the diagonal; None: the graph does not allow it.
        importance: None: the bundle lacks the graph for it.
        task: None: not asked for, or the bundle lacks the graph.
        labelled: heads with a label.
        notes: what was left out, and why.
    """

    model_name: str
    bundle_sha256: str
    corpus_name: str
    corpus_licence: str
    num_sentences: int
    heads: tuple[Head, ...]
    patterns: Patterns
    copies: CopyTest | None
    syntax: tuple[RelationScore, ...] | None
    tied: TiedDiagonal | None
    importance: Importance | None
    task: TaskEffect | None
    labelled: tuple[Labelled, ...]
    notes: tuple[str, ...]

    def labels_of(self, head: Head) -> tuple[str, ...]:
        """Return the labels of a head; none: no rule fits it."""
        return next((found.labels for found in self.labelled if found.head == head), ())


class TooShortError(Exception):
    """No text is long enough to be measured."""


def measure_heads(
    bundle: Bundle,
    corpus: Corpus,
    progress: Progress,
    *,
    num_importance_texts: int = NUM_TEXTS,
    pairs: Sequence[ScoredPair] = (),
    threads: int = 0,
) -> HeadReport:
    """Measure everything that the bundle and the corpus allow.

    Args:
        bundle: of the model.
        corpus: where its sentences have words, syntax is measured too.
        progress: is told how far the run is.
        num_importance_texts: how many texts, at even distances, are run without each head; 0: none.
        pairs: for the effect of each head on their cosines; none: leave that out.
        threads: of ONNX Runtime; 0: as many as it likes.

    Raises:
        StartupError: the bundle has no tokenizer, no attention weights, or a graph can't be opened.
        TooShortError: no text has `MIN_TOKENS` tokens.
    """
    source = MapSource(bundle, threads)
    kept, num_long = _encode(source, corpus)
    long_enough = [text for _, text in kept if len(text.input_ids) >= MIN_TOKENS]
    if not long_enough:
        raise TooShortError(f"no text of {corpus.name} has {MIN_TOKENS} tokens: give longer ones")
    patterns, syntax = _measure_maps(source, corpus, kept, progress)
    copies = measure_copies(source, progress)
    tied = measure_tied(source, long_enough, progress)
    run = open_contributions(bundle, threads)
    chosen = spread(long_enough, num_importance_texts)
    notes = [*source.notes, *_notes(num_long, bundle, copies, tied, has_gates=run is not None)]
    return HeadReport(
        model_name=bundle.model.name,
        bundle_sha256=bundle.model.version,
        corpus_name=corpus.name,
        corpus_licence=corpus.licence,
        num_sentences=len(kept),
        heads=source.heads,
        patterns=patterns,
        copies=copies,
        syntax=syntax,
        tied=tied,
        importance=measure_importance(run, source, chosen, progress) if run and chosen else None,
        task=measure_task(run, source, pairs, progress) if run and pairs else None,
        labelled=label_heads(source.heads, patterns, copies, syntax or ()),
        notes=tuple(notes),
    )


def _encode(source: MapSource, corpus: Corpus) -> tuple[list[tuple[int, EncodedText]], int]:
    """Return the number of each sentence with its tokens, and how many are longer than the model takes."""
    encoded = source.encode([sentence.text for sentence in corpus.sentences])
    kept = [(number, text) for number, text in enumerate(encoded) if text is not None]
    return kept, len(encoded) - len(kept)


def _measure_maps(
    source: MapSource, corpus: Corpus, kept: Sequence[tuple[int, EncodedText]], progress: Progress
) -> tuple[Patterns, tuple[RelationScore, ...] | None]:
    """Run all texts once, for patterns and syntax."""
    sums, counts = PatternSums(len(source.heads)), SyntaxCounts(source.heads)
    for done, (place, maps) in enumerate(source.of_texts([text for _, text in kept]), start=1):
        number = kept[place][0]
        sentence = corpus.sentences[number]
        token_words = words_of_tokens(sentence.words, maps.tokens.chars) if sentence.words else None
        if len(maps.tokens.ids) >= MIN_TOKENS:
            sums.add(maps, punctuation(sentence, maps, token_words))
        if sentence.words and token_words is not None:
            weights = word_level(maps.weights, token_words, len(sentence.words))
            has_tokens = np.isin(np.arange(len(sentence.words)), token_words)
            counts.add(weights, sentence.words, has_tokens, scores=number % 2 == 1)
        progress("attention weights", done, len(kept))
    return sums.means(), counts.scores() if corpus.is_treebank else None


def punctuation(
    sentence: Sentence, maps: TextMaps, token_words: npt.NDArray[np.intp] | None
) -> npt.NDArray[np.bool_]:
    """Tell which tokens are punctuation, (T,).

    In a treebank those of words whose part of speech is PUNCT; elsewhere those of which every character is
    of a category P* of Unicode.
    """
    if sentence.words is not None and token_words is not None:
        words = [word.upos == "PUNCT" for word in sentence.words]
        return np.array([word != NO_WORD and words[word] for word in token_words])
    spans = [sentence.text[start:end] for start, end in maps.tokens.chars]
    return np.array(
        [bool(span) and all(unicodedata.category(letter)[0] == "P" for letter in span) for span in spans]
    )


def _notes(
    num_long: int, bundle: Bundle, copies: CopyTest | None, tied: TiedDiagonal | None, *, has_gates: bool
) -> list[str]:
    notes = list(tied.notes) if tied else []
    if num_long:
        notes.append(f"Texts with more than {bundle.model.max_tokens} tokens are left out: {num_long}.")
    if copies is None:
        notes.append("No test on repeated random tokens: the model takes too few tokens.")
    if tied is None:
        notes.append("No test with queries tied to keys: the graph has no two such matrices of one size.")
    if not has_gates:
        notes.append(
            "No importance of heads: the bundle has no graph of contributions; export it again to get one."
        )
    if bundle.model.default_prompt_name:
        notes.append(f"Texts are measured without the prompt {bundle.model.default_prompt_name!r}.")
    return notes
