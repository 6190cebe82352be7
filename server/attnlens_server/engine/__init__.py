"""Inference engine: runs token ids through ONNX graphs.

`engine` has one queue and several lanes per graph: threads that take batches from the queue and run them.
`scheduler` stores waiting items and chooses batches, `batch` defines items, graph inputs and outputs,
`sessions` opens and verifies graphs, and `runtimes` runs them.
"""

from attnlens_server.engine.batch import (
    HeadSelection,
    Item,
    ItemResult,
    RequestedOutput,
    RequestedReduction,
    Target,
    TokenPooling,
    WeightedPooling,
)
from attnlens_server.engine.engine import Engine, lower_priority

__all__ = [
    "Engine",
    "HeadSelection",
    "Item",
    "ItemResult",
    "RequestedOutput",
    "RequestedReduction",
    "Target",
    "TokenPooling",
    "WeightedPooling",
    "lower_priority",
]
