"""Reports on the attention heads of a model, measured on a treebank or on plain texts.

`treebank` reads the texts, `maps` computes attention maps, and `words` aggregates them to words. `patterns`,
`copies`, `syntax`, `distances`, `coreference`, `relatedness`, `tied` and `importance` implement the
measurements, and `labels` the labeling rules. `probes` reads the test sentences. `report` runs all
measurements, `measures` lists the per-head results, and `tables` the best heads. `as_json`, `markdown` and
`page` render the report.
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
