"""The server: a bundle directory in, gRPC out. Knows ONNX Runtime and tokenizers; never torch.

The way of a request: `grpc_api` makes a job of a message, `serving` checks it, `text` makes ids of its texts,
the `engine` runs them, and `grpc_api` makes the reply. `server` is the life of the process.
"""

import os

from attnlens_server.config import ServerConfig

# The official builds of ONNX Runtime 1.31 report sessions and the machine to their publisher, and keep a
# database of it in the user's cache directory, unless they are told not to before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["ServerConfig"]
