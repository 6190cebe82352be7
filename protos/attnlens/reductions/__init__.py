"""Reductions of attention weights: what each is, in numpy alone, once for servers, clients and tests.

`units` says which tokens are words and which are special, `maps` makes maps of maps (words, means, rollout),
`statistics` numbers of maps, `sparse` and `sqrt_uint8` smaller forms of them, `choices` what may be asked
for, `reduce` the order in which all of it happens, and `sizes` what comes out and what it takes.

Letters in shapes: L layers, H heads, T tokens of a text, U units (tokens or words) that are left, R rows.
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
from attnlens.reductions.reduce import Data, Reduced, reduce
from attnlens.reductions.sparse import SparseWeights, TopKWeights
from attnlens.reductions.statistics import RowStatistics
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
