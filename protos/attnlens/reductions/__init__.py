"""Reductions of attention weights, implemented in NumPy for servers, clients and tests.

| module | contents |
|---|---|
| `choices` | the options of a reduction and their validation |
| `units` | words and special tokens of a text, and the resulting rows and columns |
| `maps` | reductions from maps to maps: words, means, rollout |
| `forms` | compact forms of maps: largest weights, sparse rows, statistics, 8 bits |
| `reduce` | the steps of a reduction in their order |
| `sizes` | result size and working memory, known in advance |

Dimension names: L layers, H heads, T tokens of a text, U units (tokens or words) in the result, R rows.
"""

from attnlens.reductions.choices import (
    MAX_ROWS,
    AttentionReduction,
    Form,
    LayerChoice,
    Level,
    SpecialTokens,
    SqrtUint8,
    Statistics,
    Threshold,
    TopK,
    resolve_rows,
)
from attnlens.reductions.forms import RowStatistics, SparseWeights, TopKWeights
from attnlens.reductions.reduce import Data, Reduced, reduce
from attnlens.reductions.units import TextUnits, Units, number_words

__all__ = [
    "MAX_ROWS",
    "AttentionReduction",
    "Data",
    "Form",
    "LayerChoice",
    "Level",
    "Reduced",
    "RowStatistics",
    "SparseWeights",
    "SpecialTokens",
    "SqrtUint8",
    "Statistics",
    "TextUnits",
    "Threshold",
    "TopK",
    "TopKWeights",
    "Units",
    "number_words",
    "reduce",
    "resolve_rows",
]
