"""Access control: identities, permissions and rates of clients."""

from attnlens_server.access.control import (
    METRICS_HOST,
    Access,
    is_loopback,
    name_in_certificate,
    open_access,
    warn_if_exposed,
)

__all__ = ["METRICS_HOST", "Access", "is_loopback", "name_in_certificate", "open_access", "warn_if_exposed"]
