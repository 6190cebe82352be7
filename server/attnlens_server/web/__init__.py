"""The viewer over HTTP: `http_server` speaks it, `site` knows the paths, `pages` asks the model's service."""

from attnlens_server.web.site import Viewer, start_viewer

__all__ = ["Viewer", "start_viewer"]
