"""Benchmark cases. Each case produces one row of the result and is measured once per repetition.

`row` has the base class, `in_process` and `served` the implementations, and `turns` the scheduling.
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
