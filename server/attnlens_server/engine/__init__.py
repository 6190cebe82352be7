"""The engine: token ids in, arrays out. Its story is in `lanes`: schedule, run, hand out.

`item` is what waits, `queue` where it waits, `scheduler` what runs together, `batch` what a graph gets,
`session` what runs it, `runtimes` the programs that do, `sessions` which session it is, `outputs` each text's
part of what comes out, `lanes` the threads that do all this for one graph, `engine` the graphs.
"""

from attnlens_server.engine.engine import Engine
from attnlens_server.engine.item import (
    HeadSelection,
    Item,
    ItemResult,
    Target,
    TokenPooling,
    Wanted,
    WantedReduction,
    WeightedPooling,
)

__all__ = [
    "Engine",
    "HeadSelection",
    "Item",
    "ItemResult",
    "Target",
    "TokenPooling",
    "Wanted",
    "WantedReduction",
    "WeightedPooling",
]
