"""Finding what suits a machine: what `attnlens bench` runs.

Two questions. Which engine in which precision: `variants` says what to compare and which of it to offer,
`probe` asks each for embeddings in a process of its own, `compare` measures their speeds in turn. With which
settings: `settings` says what to try and which of it to take, `grid` times the bare graph, `traffic` the
engine. `workload` has the texts, and `bench` is the whole, from a bundle to a report.
"""

from attnlens_server.tuning.bench import BenchOptions, Report, run_bench
from attnlens_server.tuning.compare import Comparison, config_of
from attnlens_server.tuning.settings import Setting
from attnlens_server.tuning.variants import EXACT, Measured, Offer, Variant, offers
from attnlens_server.tuning.workload import Workload, draw_workload, read_shipped_workload, read_workload

__all__ = [
    "EXACT",
    "BenchOptions",
    "Comparison",
    "Measured",
    "Offer",
    "Report",
    "Setting",
    "Variant",
    "Workload",
    "config_of",
    "draw_workload",
    "offers",
    "read_shipped_workload",
    "read_workload",
    "run_bench",
]
