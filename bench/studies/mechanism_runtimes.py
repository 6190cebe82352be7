"""Generates the accuracy table of attention mechanisms in docs/mechanisms.md.

    python -m bench.studies.mechanism_runtimes [MECHANISM ...]

Randomly initialized encoders with 3 layers (the mechanism, softmax, the mechanism) and hidden size 48 are
exported and run in every installed runtime. Inputs cover all kinds of padding and exceed all windows and
blocks. Cells have the maximum absolute differences from PyTorch in fp32, for hidden states and layer outputs.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from attnlens_export import ExportOptions, export_bundle
from attnlens_export.graph.names import HIDDEN_OUTPUT
from attnlens_export.parity.grid import Case, Padding, small_grid
from attnlens_export.runtimes import ALL, RuntimeOptions, RuntimeResult, find_runtimes
from attnlens_model import EncoderConfig
from attnlens_runtimes import FP32

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from runtimes.measured import measure

MECHANISMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "longformer": {"window": 8, "num_global_tokens": 2},
    "big_bird": {"block_size": 4, "num_random_blocks": 1, "table_tokens": 96},
    "overlapping": {"overlap": 3},
    "mixture": {"shared_heads": 2, "active_heads": 2},
    "composed": {},
}
MAX_TOKENS = 96
CASES = [*small_grid(33), Case(2, 64, Padding.RIGHT), Case(2, MAX_TOKENS, Padding.MIDDLE)]


def configuration(name: str) -> EncoderConfig:
    """Return the encoder configuration of a row."""
    attention = [{"kind": name, "num_heads": 6, **MECHANISMS[name]}, {"kind": "softmax", "num_heads": 6}]
    return EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": 48,
            "num_layers": 3,
            "embeddings": {"vocab_size": 300},
            "positions": {"max_position_embeddings": MAX_TOKENS},
            "attention": attention,
            "feed_forward": {"intermediate_size": 80},
        }
    )


def cell(result: RuntimeResult) -> str:
    """Return the maximum errors of hidden states and layer outputs, or the reason for a failure."""
    if result.stops:
        return next(iter(result.stops.values()))
    verdict = "" if result.passed else " **failed**"
    hidden = [errors for errors in result.errors if errors.role == HIDDEN_OUTPUT]
    others = [errors for errors in result.errors if errors.role != HIDDEN_OUTPUT]
    if result.precision != FP32:
        return f"{result.precision}: {min(errors.min_cosine for errors in hidden):.6f}{verdict}"
    worst = [max(errors.max_abs_error for errors in group) for group in (hidden, others)]
    return f"{worst[0]:.1e} / {worst[1]:.1e}{verdict}"


def main() -> None:
    """Print one table row per mechanism."""
    runtimes, _ = find_runtimes(RuntimeOptions((ALL,)))
    names = [runtime.name for runtime in runtimes]
    print("| mechanism | " + " | ".join(names) + " |")
    print("|" + "---|" * (len(runtimes) + 1))
    for name in sys.argv[1:] or MECHANISMS:
        with tempfile.TemporaryDirectory() as directory:
            bundle = Path(directory) / "bundle"
            export_bundle(configuration(name), bundle, ExportOptions(grid=CASES))
            cells = [cell(measure(bundle, runtime, CASES)) for runtime in runtimes]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
