"""The server: a bundle directory in, gRPC out. Knows ONNX Runtime and tokenizers; never torch.

The way of a request: `grpc_api` makes a job of a message, `serving` checks it, `text` makes ids of its texts,
the `engine` runs them, and `grpc_api` makes the reply. `server` is the life of the process.
"""

import os
from typing import TYPE_CHECKING, Any

from attnlens_server.config import ServerConfig

if TYPE_CHECKING:
    from attnlens_server.in_process import Local, local

# The official builds of ONNX Runtime 1.31 report sessions and the machine to their publisher, and keep a
# database of it in the user's cache directory, unless they are told not to before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["Local", "ServerConfig", "local"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    # Not imported at once: a server does without the client.
    if name in {"Local", "local"}:
        from attnlens_server import in_process  # noqa: PLC0415 - see above

        return getattr(in_process, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
