"""The engine: token ids in, tensors out. `queue -> pack -> run -> slice`.

`item` is what waits, `queue` where it waits, `pack` what runs together, `session` what runs it (`device`,
where attention stays on a GPU), `sessions` which one does, `outputs` what comes out and each text's part
of it, `worker` the threads that make it, its lanes, and `engine` the two of them: a worker a graph.
"""

from attnlens_server.engine.engine import Engine
from attnlens_server.engine.item import ALL_HEADS, AttentionSelection, Item, ItemResult, TokenPooling
from attnlens_server.engine.worker import SessionWorker

__all__ = ["ALL_HEADS", "AttentionSelection", "Engine", "Item", "ItemResult", "SessionWorker", "TokenPooling"]
