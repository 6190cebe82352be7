"""The viewer over HTTP: `http_server` parses requests, `site` routes them, and `pages` creates pages."""

from attnlens_server.web.site import Viewer, start_viewer

__all__ = ["Viewer", "start_viewer"]
