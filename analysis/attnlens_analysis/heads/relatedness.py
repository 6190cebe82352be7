"""Attention from a word to an earlier occurrence of the same word, to a synonym, and to an unrelated word.

Each text is measured in three variants that differ only in the earlier word (`probes`). The position, the
context and the attending word are the same, so a difference between the weights on a synonym and on an
unrelated word is caused by the earlier word. All unrelated words together are the synonyms in another order,
so both have the same frequencies.

Shapes: N heads, I items.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.intervals import bootstrap_ratio
from attnlens_analysis.heads.maps import EncodedText, MapSource, Progress
from attnlens_analysis.heads.probes import WordPairItem, word_pair_items
from attnlens_analysis.heads.words import word_level, words_of_tokens

_NUM_VARIANTS = 3
_SAME, _SYNONYM, _UNRELATED = range(_NUM_VARIANTS)

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Weight on an earlier word compared with the weight on an unrelated word in the same position.

    Attributes:
        weight: (N,) mean weight on the earlier word.
        difference: (N,) `weight` minus the weight on the unrelated word.
        interval: (2, N) 95 % bootstrap interval of `difference` over items.
    """

    weight: Values
    difference: Values
    interval: Values


@dataclass(frozen=True, slots=True)
class Relatedness:
    """Results of the test with related words.

    Attributes:
        num_items: Number of items I.
        unrelated: (N,) mean weight on the unrelated word.
        same_word: Weight on an earlier occurrence of the same word.
        synonym: Weight on a synonym.
    """

    num_items: int
    unrelated: Values
    same_word: Comparison
    synonym: Comparison


def measure_relatedness(source: MapSource, progress: Progress) -> Relatedness | None:
    """Run the test on the included texts. Return None if there is no text the model can process."""
    items = word_pair_items()
    variants = [words for item in items for words in item.variants]
    encoded = source.encode([" ".join(words) for words in variants])
    weights = np.full((len(variants), len(source.heads)), np.nan)
    kept: list[tuple[int, EncodedText]] = [
        (index, text) for index, text in enumerate(encoded) if text is not None
    ]
    for done, (position, maps) in enumerate(source.of_texts([text for _, text in kept]), start=1):
        index = kept[position][0]
        item = items[index // _NUM_VARIANTS]
        token_words = words_of_tokens(variants[index], maps.tokens.chars)
        if {item.first, item.second} <= set(token_words.tolist()):
            weights[index] = pair_weight(maps.weights, token_words, item)
        progress("related words", done, len(kept))
    return compare_words(weights.reshape(len(items), _NUM_VARIANTS, len(source.heads)))


def pair_weight(
    weights: npt.NDArray[np.float32], token_words: npt.NDArray[np.intp], item: WordPairItem
) -> npt.NDArray[np.float32]:
    """Return the weight from the second to the first word of an item, (N,), from weights (N, T, T)."""
    result: npt.NDArray[np.float32] = word_level(weights, token_words, len(item.words))[
        :, item.second, item.first
    ]
    return result


def compare_words(weights: Values) -> Relatedness | None:
    """Compare the weights on the three variants of the earlier word.

    Args:
        weights: (I, 3, N) weights on the same word, its synonym and the unrelated word. Items with NaN are
            excluded.

    Returns:
        Comparisons, or None if all items are excluded.
    """
    weights = weights[~np.isnan(weights).any(axis=(1, 2))]
    if not len(weights):
        return None
    means = weights.mean(axis=0)
    comparisons = []
    for variant in (_SAME, _SYNONYM):
        differences = weights[:, variant] - weights[:, _UNRELATED]
        interval = bootstrap_ratio(differences, np.ones((len(weights), 1)))
        comparisons.append(Comparison(means[variant], differences.mean(axis=0), interval))
    return Relatedness(len(weights), means[_UNRELATED], *comparisons)
