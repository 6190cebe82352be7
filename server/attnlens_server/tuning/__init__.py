"""Benchmark of engines, precisions and settings, used by `attnlens bench`.

`bench` runs the measurements on a `workload`. `variants` and `settings` list the candidates and select the
best results. `throughput` measures an engine, and `probe` runs one in a separate process.
"""

from attnlens_server.tuning.bench import BenchOptions, Comparison, Report, config_for, run_bench
from attnlens_server.tuning.settings import Setting
from attnlens_server.tuning.variants import EXACT, Recommendation, Variant, VariantResult, recommend
from attnlens_server.tuning.workload import Workload, draw_workload, read_shipped_workload, read_workload

__all__ = [
    "EXACT",
    "BenchOptions",
    "Comparison",
    "Recommendation",
    "Report",
    "Setting",
    "Variant",
    "VariantResult",
    "Workload",
    "config_for",
    "draw_workload",
    "read_shipped_workload",
    "read_workload",
    "recommend",
    "run_bench",
]
