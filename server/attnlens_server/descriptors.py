"""File descriptors of the process, of which each connection takes one."""

import logging
import resource
from contextlib import suppress

from attnlens_server.config import ServerConfig
from attnlens_server.errors import StartupError

logger = logging.getLogger(__name__)

MAX_GRPC_CONNECTIONS = 4096
"""Maximum number of gRPC connections, each of which takes about 20 KB before its handshake."""
MIN_GRPC_CONNECTIONS = 32
METRICS_DESCRIPTORS = 64
OTHER_DESCRIPTORS = 192  # files, sockets of this process, threads of libraries


def reserve_descriptors(config: ServerConfig) -> None:
    """Allow the process to open a descriptor for each connection that the configuration allows.

    Raises:
        StartupError: The system does not allow enough descriptors for `max_connections`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _used_descriptors(config) + MAX_GRPC_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        with suppress(OSError, ValueError):  # macOS has a further limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    num_grpc = grpc_connections(config)
    if num_grpc < MIN_GRPC_CONNECTIONS:
        raise StartupError(
            f"max_connections is {config.max_connections}, but this process may only open {soft} files, and "
            "each connection takes one: use a smaller --max-connections, or raise the limit (LimitNOFILE= of "
            "systemd, ulimit -n)"
        )
    if num_grpc < MAX_GRPC_CONNECTIONS:
        logger.warning(
            "this process may only open %d files, so at most %d gRPC connections are accepted: raise the "
            "limit (LimitNOFILE= of systemd, ulimit -n)",
            soft,
            num_grpc,
        )


def grpc_connections(config: ServerConfig) -> int:
    """Return the maximum number of gRPC connections, which leaves descriptors for all other connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_GRPC_CONNECTIONS
    return min(MAX_GRPC_CONNECTIONS, soft - _used_descriptors(config))


def _used_descriptors(config: ServerConfig) -> int:
    """Return the number of descriptors for anything but gRPC connections."""
    num_http = 0 if config.http_port is None else config.max_connections + config.max_connections // 16
    return num_http + METRICS_DESCRIPTORS + OTHER_DESCRIPTORS
