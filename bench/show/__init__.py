"""Reporting for `make bench`: targets, tables and a chart."""
