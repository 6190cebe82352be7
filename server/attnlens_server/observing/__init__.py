"""Observation of requests: access log, traces, and a log that never blocks."""
