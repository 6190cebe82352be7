"""One module a runtime; each defines `RUNTIME` and imports the runtime only when it opens a graph."""
