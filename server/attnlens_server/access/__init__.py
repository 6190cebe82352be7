"""Access control: identities, permissions and rates of clients."""

from attnlens_server.access.control import Access, Caller, name_in_certificate, open_access, warn_if_exposed

__all__ = ["Access", "Caller", "name_in_certificate", "open_access", "warn_if_exposed"]
