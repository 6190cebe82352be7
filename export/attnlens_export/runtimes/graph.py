"""A graph of a bundle, open in the process of a runtime. B batch, T tokens, D width, E components."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    BATCH_AXIS,
    CONTRIBUTIONS_PATH,
    DIRECTION,
    HIDDEN_OUTPUT,
    LENGTH_AXIS,
    contribution_outputs,
    layer_outputs,
    output_axes,
)
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.reference import Tensors
from attnlens_model import EncoderConfig
from attnlens_runtimes import GraphProcess, RuntimeFailureError

Feed = Mapping[str, npt.NDArray[np.generic]]
_Axes = Mapping[str, tuple[int | str, ...]]


class ProcessGraph:
    """A graph whose answers have the shapes that its inputs ask for.

    Attributes:
        path: the file's place in the bundle.
        precision: what the runtime computes in, as it says.
        processor: the processor's own name, as the runtime tells it; empty where it does not.
    """

    def __init__(self, path: str, process: GraphProcess, config: EncoderConfig) -> None:
        self.path = path
        self.precision = process.precision
        self.processor = process.processor
        self._process = process
        self._config = config

    def run(self, inputs: Inputs) -> Tensors:
        """Return every output by name.

        Raises:
            RuntimeFailureError: there is no answer, or one of other shapes.
        """
        return self.run_feed(inputs.feed())

    def run_feed(self, feed: Feed) -> Tensors:
        """Return every output by name, for inputs by name.

        Raises:
            RuntimeFailureError: there is no answer, or one of other shapes.
        """
        batch_size, length = feed["input_ids"].shape
        sizes = {BATCH_AXIS: batch_size, LENGTH_AXIS: length}
        expected = {
            name: tuple(axis if isinstance(axis, int) else sizes[axis] for axis in axes)
            for name, axes in self._axes(feed).items()
        }
        outputs = self._process.run(feed)
        found, shapes = [output.shape for output in outputs], list(expected.values())
        if found != shapes:
            raise RuntimeFailureError(f"outputs of the shapes {found} instead of {shapes}")
        return dict(zip(expected, outputs, strict=True))

    def _axes(self, feed: Feed) -> _Axes:
        """Return the outputs in the graph's order with their axes."""
        if self.path == CONTRIBUTIONS_PATH:
            return contribution_outputs(self._config, feed[DIRECTION].shape[1])
        axes: dict[str, tuple[int | str, ...]] = {
            HIDDEN_OUTPUT: (BATCH_AXIS, LENGTH_AXIS, self._config.vector_size)
        }
        if self.path == ATTENTIONS_PATH:
            axes |= {name: output_axes(output) for name, (_, output) in layer_outputs(self._config).items()}
        return axes
