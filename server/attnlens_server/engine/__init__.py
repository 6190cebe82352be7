"""Inference engine: runs token ids through ONNX graphs.

The control flow is in `lanes`: worker threads that take batches from the queue and run them.
`queue` stores waiting items, `scheduler` chooses batches, `batch` defines items, graph inputs and outputs,
`sessions` opens and verifies graphs, `runtimes` runs them, and `engine` combines the graphs of a model.
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
from attnlens_server.engine.engine import Engine

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
]
