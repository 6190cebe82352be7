"""A model in the caller's process, with the methods and results of the client.

method -> steps of the client's core -> driver -> handlers of `grpc_api` in the host's thread -> engine
"""

from attnlens_server.in_process.local_model import Local, local

__all__ = ["Local", "local"]
