"""Bundles: `open` opens and verifies one, `check` validates its manifest, and `files` detects altered files.

`model` describes the model for modules that do not use protobuf.
"""

from attnlens_server.bundle.model import (
    Classifier,
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
    "Classifier",
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
