"""Bundles: opening a directory, verifying its files, and what the other rooms need to know of its model.

`open` opens and `files` watches them, `check` judges the manifest, and `model` is what is left of it for the
rooms that know no protobuf.
"""

from attnlens_server.bundle.model import (
    ContributionsGraph,
    Graph,
    Kind,
    Layout,
    Model,
    ModelOutputs,
    Output,
    OutputRole,
    RowSum,
)
from attnlens_server.bundle.open import Bundle, open_bundle

__all__ = [
    "Bundle",
    "ContributionsGraph",
    "Graph",
    "Kind",
    "Layout",
    "Model",
    "ModelOutputs",
    "Output",
    "OutputRole",
    "RowSum",
    "open_bundle",
]
