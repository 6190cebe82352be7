"""The dnn module of OpenCV, which supports transformers since version 5."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from attnlens_runtimes.runtime import Feed, Opened, PythonRuntime

_DISTRIBUTIONS = (
    "opencv-python-headless",
    "opencv-python",
    "opencv-contrib-python-headless",
    "opencv-contrib-python",
)


def open_graph(path: Path) -> Opened:
    """Read the graph."""
    import cv2  # noqa: PLC0415 - only in its own process

    net = cv2.dnn.readNetFromONNX(str(path))
    outputs = net.getUnconnectedOutLayersNames()

    def run(feed: Feed) -> Sequence[npt.NDArray[Any]]:
        for name, array in feed.items():
            net.setInput(array, name)
        # Outputs that are not requested by name are optimized away.
        return net.forward(outputs)

    return Opened(run)


RUNTIME = PythonRuntime("opencv", _DISTRIBUTIONS, open_graph)
