"""Finding the settings that suit a machine: what `attnlens bench` runs.

`settings` says what to try and which of it to take, `workload` with which texts, `grid` times the bare graph,
`traffic` the engine, and `bench` is the whole, from a bundle to a report.
"""

from attnlens_server.tuning.bench import BenchOptions, Report, run_bench
from attnlens_server.tuning.workload import Workload, draw_workload, read_workload

__all__ = ["BenchOptions", "Report", "Workload", "draw_workload", "read_workload", "run_bench"]
