"""Results of the PyTorch encoder are stored, and its weights are freed before a graph is opened."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from attnlens_export import ExportOptions, bundle, contents, export_bundle
from attnlens_export.graph.names import HIDDEN_OUTPUT
from attnlens_export.parity import sessions
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.parity.reference import Tensors, run_float64, run_fp32
from attnlens_export.parity.stored import References
from attnlens_model import EncoderConfig, new_encoder
from configs import small_config


def count_parameters(encoder: nn.Module) -> int:
    return sum(parameter.numel() for parameter in encoder.parameters())


def test_stored_results_are_those_of_the_encoder(tiny_config: EncoderConfig) -> None:
    """Also those that are so large that they are in a file."""
    encoder = new_encoder(tiny_config, seed=0)
    inputs = make_inputs(Case(8, 40, Padding.LEFT), tiny_config)
    fp32 = run_fp32(encoder, inputs, with_attentions=True)
    float64: Tensors = {}
    float64[HIDDEN_OUTPUT] = run_float64(encoder, inputs, float64.__setitem__)
    references = References(encoder, is_owned=True)
    for _ in range(2):
        for stored, expected in (
            (references.fp32(inputs, with_attentions=True), fp32),
            (references.float64(inputs, with_attentions=True), float64),
        ):
            assert stored.keys() == expected.keys()
            for name, array in expected.items():
                assert array.nbytes > 2**16 or name == HIDDEN_OUTPUT
                np.testing.assert_array_equal(stored[name], array)
                assert stored[name].dtype == array.dtype
        references.release()
    assert references.fp32(inputs).keys() == fp32.keys()
    with pytest.raises(RuntimeError, match="was not stored before its release"):
        references.fp32(make_inputs(Case(1, 1, Padding.NONE), tiny_config))
    assert count_parameters(encoder) == 0


def test_attention_is_computed_when_it_is_first_needed(tiny_config: EncoderConfig) -> None:
    references = References(new_encoder(tiny_config, seed=0))
    inputs = make_inputs(Case(2, 7, Padding.LEFT), tiny_config)
    assert [*references.float64(inputs)] == [HIDDEN_OUTPUT]
    assert len(references.float64(inputs, with_attentions=True)) == 1 + tiny_config.num_layers


def test_weights_are_freed_before_graphs_are_opened(
    tiny_config: EncoderConfig, quick: ExportOptions, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAX_CONCURRENT_BYTES", 0)
    encoders = []
    held = []

    def initialize(*args: Any) -> Any:
        encoders.append(new_encoder(*args))
        return encoders[-1]

    def open_session(*args: Any, **options: Any) -> Any:
        held.append(count_parameters(encoders[-1]))
        return session(*args, **options)

    session = sessions.open_session
    monkeypatch.setattr(bundle, "new_encoder", initialize)
    monkeypatch.setattr(sessions, "open_session", open_session)
    export_bundle(tiny_config, output, quick)
    assert len(held) > 3
    assert not any(held)


MEASURED = """
import sys
from pathlib import Path
from attnlens_export import ExportOptions, contents, export_bundle, repeats
from attnlens_export.parity.grid import small_grid
from attnlens_model import EncoderConfig

def read(key):
    [line] = [line for line in open("/proc/self/status") if line.startswith(key)]
    return 1024 * int(line.split()[1])

contents.MAX_CONCURRENT_BYTES = 0  # as for a large encoder
repeats.THREADS = (1,)
options = ExportOptions(grid=small_grid(5), max_embedded_bytes=0)
before = read("VmRSS")
export_bundle(EncoderConfig.from_json(sys.argv[1]), Path(sys.argv[2]), options)
print(read("VmHWM") - before)
"""
# Modules that PyTorch imports for a trace.
FLOOR_BYTES = 350_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_encoder_and_session_do_not_take_memory_at_the_same_time(tmp_path: Path) -> None:
    """The contribution graph has two copies of each matrix, because it multiplies by its transpose, too."""
    values = {"hidden_size": 1024, "num_layers": 1, "feed_forward.intermediate_size": 3 * 2**13}
    command = [sys.executable, "-c", MEASURED, small_config(values).to_json(), str(tmp_path / "bundle")]
    peak_bytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    weight_bytes = 4 * 2 * 1024 * 3 * 2**13
    assert weight_bytes < peak_bytes < 2.5 * weight_bytes + FLOOR_BYTES
