"""The engine: token ids in, tensors out. `submit -> queue -> pack -> run -> slice`.

`item` is what waits, `queue` where it waits, `pack` what runs together, `session` what runs it, and
`engine` the story: one worker thread a session, one session a graph.
"""

from attnlens_server.engine.engine import Engine
from attnlens_server.engine.item import Item, ItemResult

__all__ = ["Engine", "Item", "ItemResult"]
