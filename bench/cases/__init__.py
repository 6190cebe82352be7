"""What is measured: each case is a row of the result, measured once in each repetition.

`row` is what all have in common, `in_process` and `served` the two kinds, and `turns` measures them in turns.
"""

from bench.cases.in_process import Choice, InProcessCase, MatMulCase, OneByOneCase
from bench.cases.row import MATMUL, MINILM, Case, Reference, Row, RowKey, Sample
from bench.cases.served import ServerCase, merge
from bench.cases.turns import interleave, prepare_all

__all__ = [
    "MATMUL",
    "MINILM",
    "Case",
    "Choice",
    "InProcessCase",
    "MatMulCase",
    "OneByOneCase",
    "Reference",
    "Row",
    "RowKey",
    "Sample",
    "ServerCase",
    "interleave",
    "merge",
    "prepare_all",
]
