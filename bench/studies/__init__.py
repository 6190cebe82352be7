"""Measurements that stand alone: `python -m bench.studies.NAME`."""
