"""What every attention head of a model does, measured on a treebank or on plain texts.

`treebank` reads the texts, `maps` runs them through the bundle's attention graph, and `words` makes words of
tokens. `patterns`, `copies`, `syntax`, `tied` and `importance` each measure one thing. `labels` states the
rules, `report` runs all of it, `measures` lists what it has of each head. `as_json`, `markdown` and `page`
write it.
"""

from attnlens_analysis.heads.importance import ScoredPair
from attnlens_analysis.heads.maps import Head
from attnlens_analysis.heads.report import HeadReport, TooShortError, measure_heads
from attnlens_analysis.heads.treebank import (
    Corpus,
    TreebankError,
    read_conllu,
    read_texts,
    shipped_treebank,
)

__all__ = [
    "Corpus",
    "Head",
    "HeadReport",
    "ScoredPair",
    "TooShortError",
    "TreebankError",
    "measure_heads",
    "read_conllu",
    "read_texts",
    "shipped_treebank",
]
