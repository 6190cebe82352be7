"""The engine: token ids in, tensors out. `queue -> pack -> run -> slice`.

`item` is what waits, `queue` where it waits, `pack` what runs together, `session` what runs it, `sessions`
which one does, `worker` the threads that make it, its lanes, and `engine` the two of them: a worker a graph.
"""

from attnlens_server.engine.engine import Engine
from attnlens_server.engine.item import Item, ItemResult
from attnlens_server.engine.worker import SessionWorker

__all__ = ["Engine", "Item", "ItemResult", "SessionWorker"]
