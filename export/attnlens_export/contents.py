"""What a bundle holds: which graphs and files, what each graph must be, and how each is measured."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import onnx

from attnlens.bundle import MANIFEST_NAME
from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import Graph, GraphPurpose
from attnlens_export.contributions.measure import measure_contributions
from attnlens_export.errors import GraphError
from attnlens_export.fp16.precision import Fp16
from attnlens_export.graph.lint import check_graph
from attnlens_export.graph.names import CONTRIBUTIONS_PATH, GRAPH_PURPOSES, graph_id
from attnlens_export.graph.parameters import compare_tables
from attnlens_export.graph.read import check_valid, read_structure
from attnlens_export.int8.precision import Int8
from attnlens_export.parity.long_context import measure_long_context
from attnlens_export.parity.measure import Subject, measure_parity
from attnlens_export.precision import Precision, Stated
from attnlens_export.progress import Progress
from attnlens_export.published.pooling import read_embedding_size
from attnlens_export.repeats import measure_repeats
from attnlens_export.verdict import Verdict
from attnlens_model import EncoderConfig

PRECISIONS: dict[str, Precision] = {precision.name: precision for precision in (Fp16(), Int8())}
"""The lower precisions by the names that `--precision` takes, with their default options."""


def bundle_files(directory: Path) -> list[Path]:
    """Return every file of a bundle but the manifest itself, which can't hold its own hash."""
    manifest = directory / MANIFEST_NAME
    return [path for path in sorted(directory.rglob("*")) if path.is_file() and path != manifest]


def precisions_of(directory: Path) -> list[Precision]:
    """Return the lower precisions in which a bundle has a graph."""
    return [precision for precision in PRECISIONS.values() if (directory / precision.path).is_file()]


def graphs_of(directory: Path) -> Iterator[Graph]:
    """Yield id, path, purpose and precision of each graph: those in fp32, then those in lower precisions."""
    for path, purpose in GRAPH_PURPOSES.items():
        fp32 = manifest_pb2.Precision.PRECISION_FP32
        yield Graph(id=graph_id(path), path=path, purpose=purpose, precision=fp32)
    if (directory / CONTRIBUTIONS_PATH).is_file():
        purpose, fp32 = GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS, manifest_pb2.Precision.PRECISION_FP32
        yield Graph(id=graph_id(CONTRIBUTIONS_PATH), path=CONTRIBUTIONS_PATH, purpose=purpose, precision=fp32)
    for precision in precisions_of(directory):
        purpose = GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS
        yield Graph(
            id=graph_id(precision.path), path=precision.path, purpose=purpose, precision=precision.number
        )


def check_graphs(directory: Path, config: EncoderConfig) -> None:
    """Check the graphs of a bundle with ONNX's own checker and with ours.

    Raises:
        GraphError: ONNX refuses one.
        LintError: one is not what a bundle promises.
    """
    precisions = {precision.path: precision for precision in precisions_of(directory)}
    embedding_size = read_embedding_size(directory, config.vector_size)
    for graph in graphs_of(directory):
        path, precision = directory / graph.path, precisions.get(graph.path)
        try:
            check_valid(path)
        except onnx.checker.ValidationError as error:
            raise GraphError(f"{path} is not valid ONNX: {error}") from error
        check_graph(
            read_structure(path),
            graph.path,
            config,
            graph.purpose,
            more_operators=precision.operators if precision else frozenset(),
            more_types=precision.element_types if precision else frozenset(),
            directory=path.parent,
            embedding_size=embedding_size,
        )


def measure_graphs(
    subject: Subject, stated: Mapping[str, Stated], progress: Progress, *, beyond_grid: bool = True
) -> Verdict:
    """Measure every graph of a bundle.

    Args:
        subject: the bundle and its reference.
        stated: of each graph in a lower precision, by path, what the manifest says or will say.
        progress: called before each step.
        beyond_grid: Whether inputs longer than those of the grid are compared, see `parity.long_context`.

    Raises:
        GraphError: A table of positions in a graph differs from the encoder's.
    """
    for path in GRAPH_PURPOSES:
        compare_tables(subject.directory / path, subject.encoder)
    parity = measure_parity(subject, list(GRAPH_PURPOSES), partial(progress, "Parity"))
    long_context = (
        measure_long_context(subject, parity, partial(progress, "Long inputs")) if beyond_grid else None
    )
    results = [
        precision.measure(subject, stated[precision.path], progress)
        for precision in precisions_of(subject.directory)
    ]
    contributions = None
    if (subject.directory / CONTRIBUTIONS_PATH).is_file():
        contributions = measure_contributions(subject, partial(progress, "Contributions"))
    paths = [graph.path for graph in graphs_of(subject.directory)]
    repeats = measure_repeats(subject.directory, paths, subject.config, partial(progress, "Repeated runs"))
    return Verdict(parity, tuple(results), contributions, long_context, repeats)
