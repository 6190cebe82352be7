"""Access control: who sends a call, and what the sender may do."""

from attnlens_server.access.control import Access, Caller, name_in_certificate, open_access, warn_if_exposed

__all__ = ["Access", "Caller", "name_in_certificate", "open_access", "warn_if_exposed"]
