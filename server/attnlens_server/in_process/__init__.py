"""A model in the caller's own process: the methods and results of the client, without a server.

method ─▶ steps of the client's core ─▶ driver ─▶ host's thread: the handlers of `grpc_api` ─▶ engine
"""

from attnlens_server.in_process.local_model import Local, local

__all__ = ["Local", "local"]
