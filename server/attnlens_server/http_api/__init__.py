"""HTTP: routes of common embedding APIs, the viewer and health checks, as an ASGI application."""
