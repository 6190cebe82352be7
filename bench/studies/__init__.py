"""Standalone measurements: `python -m bench.studies.NAME`."""
