"""The result of `make bench`: targets, tables and a chart."""
