"""The attnlens server, which serves a bundle over gRPC. It never imports PyTorch.

`grpc_api` converts messages, `operations` has a module for each operation on a model, which validates and
runs its requests, `core` has what they share, `text` tokenizes, `engine` runs the graphs, and `server`
manages the process.
"""

import os
from typing import TYPE_CHECKING, Any

from attnlens_server.config import ServerConfig

if TYPE_CHECKING:
    from attnlens_server.in_process import Local, local

# Official builds of ONNX Runtime 1.31 send telemetry about sessions and the machine, and store it in the
# user's cache directory, unless it is disabled before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["Local", "ServerConfig", "local"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any attribute
    # Imported lazily, since the server does not need the client.
    if name in {"Local", "local"}:
        from attnlens_server import in_process  # noqa: PLC0415 - see above

        return getattr(in_process, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
