"""The engine: token ids in, tensors out. `queue -> pack -> run -> slice`.

`item` is what waits, `queue` where it waits, `pack` what runs together, `session` what runs it, `worker`
the thread that does, and `engine` the two of them: one worker a session, one session a graph.
"""

from attnlens_server.engine.engine import Engine
from attnlens_server.engine.item import Item, ItemResult
from attnlens_server.engine.worker import SessionWorker

__all__ = ["Engine", "Item", "ItemResult", "SessionWorker"]
