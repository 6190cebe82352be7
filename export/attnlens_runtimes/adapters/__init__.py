"""Runtimes, one per module. Each module defines `RUNTIME` and imports the runtime when it opens a graph."""
