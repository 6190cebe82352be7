"""Keeps out of gRPC's log what any client can cause at will."""

import logging

import grpc


def leave_out_what_clients_do() -> None:
    """Keep tracebacks of calls that end because of their clients out of the log."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_clients_doing)


def _is_no_clients_doing(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)  # the client left before its reply was sent
