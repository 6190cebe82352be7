"""The server: a bundle directory in, gRPC out. Knows ONNX Runtime and tokenizers; never torch.

The way of a request: `service` validates (`requests`), turns text into ids (`text`), hands items to the
`engine` (queue, pack, session), and builds the reply (`responses`). `server` is the life of the process.
"""

from attnlens_server.config import ServerConfig

__all__ = ["ServerConfig"]
