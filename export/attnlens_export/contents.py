"""Contents of a bundle: its files and graphs, the requirements of each graph, and all measurements.

`check_graphs` validates the graphs. `measure_graphs` compares them with the PyTorch encoder.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from attnlens.bundle import MANIFEST_NAME
from attnlens.short_repr import short_repr
from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import Graph, GraphPurpose, Parity
from attnlens_export.classification import measure_logits
from attnlens_export.contributions.measure import measure_contributions, store_gradients
from attnlens_export.errors import GraphError
from attnlens_export.fp16 import Fp16
from attnlens_export.graph.lint import check_graph
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    CONTRIBUTIONS_PATH,
    ENCODER_PATH,
    HIDDEN_OUTPUT,
    MODEL_PATH,
    embeddings_path,
    graph_id,
)
from attnlens_export.graph.parameters import compare_tables
from attnlens_export.graph.read import check_valid, read_structure
from attnlens_export.int8.precision import Int8
from attnlens_export.parity.grid import Case, map_bytes
from attnlens_export.parity.long_context import (
    MAX_MEMORY_SHARE,
    LongContext,
    measure_long_context,
    memory_limit,
    store_long_text,
)
from attnlens_export.parity.measure import Run, Subject, measure_parity, run_embeddings, store_grid
from attnlens_export.precision import Precision, Stated
from attnlens_export.progress import Progress, StageProgress, beside
from attnlens_export.published.classifier import has_head
from attnlens_export.published.pooling import read_embedding_size
from attnlens_export.repeats import measure_repeats
from attnlens_export.results import Result, describe_first
from attnlens_model import EncoderConfig

PRECISIONS: dict[str, Precision] = {precision.name: precision for precision in (Fp16(), Int8())}
"""Lower precisions with default options, by the value of `--precision`."""

MAX_CONCURRENT_BYTES = 2**29
"""Maximum memory of the contributions graph for which it is measured while PyTorch computes references."""


@short_repr
@dataclass(frozen=True)
class Verdict:
    """All measurements of a bundle.

    Attributes:
        parity: Graphs in fp32.
        precisions: Graphs in lower precisions by name, in the order of the manifest.
        logits: Logits graph. None if the bundle is not that of a classifier.
        contributions: Contribution graph. None if the bundle has none.
        long_context: Errors on inputs longer than those of the parity grid. None if not measured.
        repeats: Repeated runs of every graph. None if not measured.
        num_cases: Number of input shapes in the parity grid.
    """

    parity: Result
    precisions: Mapping[str, Result] = field(default_factory=dict)
    contributions: Result | None = None
    logits: Result | None = None
    long_context: LongContext | None = None
    repeats: Result | None = None
    num_cases: int = 0

    def __repr__(self) -> str:
        results, failures = self.results, self.failures()
        verdict = "passed" if self.passed else f"failed: {'; '.join(failures)}"
        return f"Verdict({len(results)} results, {verdict})"

    @property
    def results(self) -> dict[str, Result]:
        """All results by name, in the order of the manifest."""
        results = {"parity": self.parity, "logits": self.logits, "contributions": self.contributions}
        results |= {**self.precisions, "long_context": self.long_context, "repeats": self.repeats}
        return {name: result for name, result in results.items() if result is not None}

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(result.passed for result in self.results.values())

    def failures(self) -> list[str]:
        """Return one line per failed figure, by check."""
        return [line for result in self.results.values() for line in result.failures()]

    def describe_failure(self) -> str:
        """Return one line with the first failure and the number of others."""
        return f"parity failed: {describe_first(self.failures() or ['nothing was measured'])}"

    def to_message(self) -> Parity:
        """Return the entry of the manifest."""
        return Parity(
            passed=self.passed,
            num_cases=self.num_cases,
            gates=[gate for result in self.results.values() for gate in result.gates()],
            figures=[figure for result in self.results.values() for figure in result.figures()],
            long_context=self.long_context.message if self.long_context else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as JSON values. Non-finite numbers become None."""
        names = ("parity", "logits", "contributions", *PRECISIONS, "long_context", "repeats")
        return {
            "passed": self.passed,
            "failures": self.failures(),
            **dict.fromkeys(names),
            **{name: result.to_json() for name, result in self.results.items()},
        }


def bundle_files(directory: Path) -> list[Path]:
    """Return all files of a bundle except the manifest, which can't contain its own hash."""
    manifest = directory / MANIFEST_NAME
    return [path for path in sorted(directory.rglob("*")) if path.is_file() and path != manifest]


def precisions_of(directory: Path) -> list[Precision]:
    """Return the lower precisions in which a bundle has a graph."""
    return [precision for precision in PRECISIONS.values() if (directory / precision.path).is_file()]


def graph_purposes(directory: Path) -> dict[str, GraphPurpose.ValueType]:
    """Return the purposes of the fp32 graphs that every bundle of this kind has, by path."""
    purposes = {
        embeddings_path(directory): GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS,
        ATTENTIONS_PATH: GraphPurpose.GRAPH_PURPOSE_ATTENTION,
    }
    return purposes | ({MODEL_PATH: GraphPurpose.GRAPH_PURPOSE_LOGITS} if has_head(directory) else {})


def graphs_of(directory: Path) -> Iterator[Graph]:
    """Yield id, path, purpose and precision of each graph, those in fp32 first."""
    fp32 = manifest_pb2.Precision.PRECISION_FP32
    purposes = graph_purposes(directory)
    ids = {MODEL_PATH: "logits", ENCODER_PATH: "embeddings"} if has_head(directory) else {}
    if (directory / CONTRIBUTIONS_PATH).is_file():
        purposes[CONTRIBUTIONS_PATH] = GraphPurpose.GRAPH_PURPOSE_CONTRIBUTIONS
    for path, purpose in purposes.items():
        yield Graph(id=ids.get(path, graph_id(path)), path=path, purpose=purpose, precision=fp32)
    for precision in precisions_of(directory):
        yield Graph(
            id=f"{ids[MODEL_PATH]}.{precision.name}" if ids else graph_id(precision.path),
            path=precision.path,
            purpose=purposes[MODEL_PATH],
            precision=precision.number,
        )


def check_graphs(directory: Path, config: EncoderConfig) -> None:
    """Validate the graphs of a bundle with ONNX's checker and with `graph.lint`.

    Raises:
        GraphError: A graph is not valid ONNX.
        LintError: A graph is not portable.
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
    """Measure all graphs of a bundle.

    Args:
        subject: Bundle and reference.
        stated: Properties of each lower-precision graph, by path.
        progress: Called before each step.
        beyond_grid: Whether to compare inputs longer than those of the grid, see `parity.long_context`.

    Raises:
        GraphError: A table of positions in a graph differs from the encoder's.
    """
    directory, references = subject.directory, subject.references
    purposes = graph_purposes(directory)
    for path in purposes:
        compare_tables(directory / path, references.encoder)
    compared = [path for path, purpose in purposes.items() if purpose != GraphPurpose.GRAPH_PURPOSE_LOGITS]
    max_bytes = min(MAX_CONCURRENT_BYTES, memory_limit() * MAX_MEMORY_SHARE)
    has_memory = _memory_of_contributions(subject) <= max_bytes
    measure_others = partial(_measure_others, subject, compared)
    with beside(measure_others, progress, in_thread=has_memory) as others:
        _store_references(subject, partial(progress, "PyTorch"), beyond_grid=beyond_grid)
        references.release()
        runs, contributions, repeats = others()
    parity = measure_parity(subject, compared, partial(progress, "Parity"), runs)
    logits = None
    if len(compared) < len(purposes):
        logits = measure_logits(subject, partial(progress, "Logits"))
    long_context = (
        measure_long_context(subject, parity, partial(progress, "Long inputs")) if beyond_grid else None
    )
    precisions = {
        precision.name: precision.measure(subject, stated[precision.path], progress)
        for precision in precisions_of(directory)
    }
    num_cases = len(subject.cases)
    return Verdict(parity, precisions, contributions, logits, long_context, repeats, num_cases)


def _store_references(subject: Subject, progress: StageProgress, *, beyond_grid: bool) -> None:
    """Compute all results of the PyTorch encoder."""
    store_grid(subject, progress)
    if (subject.directory / CONTRIBUTIONS_PATH).is_file():
        store_gradients(subject)
    if beyond_grid:
        store_long_text(subject)
    for precision in precisions_of(subject.directory):
        precision.store_references(subject)


def _memory_of_contributions(subject: Subject) -> int:
    """Return the approximate memory in bytes of a session and of its largest run."""
    weights = sum(4 * parameter.numel() for parameter in subject.references.encoder.parameters())
    maps = (map_bytes(case, subject.config) for case in subject.cases if case.with_attentions)
    return weights + 3 * max(maps, default=0)


def _measure_others(
    subject: Subject, graph_paths: Sequence[str], progress: Progress
) -> tuple[dict[str, dict[Case, Run]], Result | None, Result]:
    """Measure contributions and repeated runs, which hardly need PyTorch.

    Args:
        subject: Bundle and reference.
        graph_paths: Paths of the graphs whose parity is measured.
        progress: Called before each step.

    Returns:
        The runs of graphs without attention for `measure_parity`, and the results.
    """
    directory = subject.directory
    runs = run_embeddings(subject, graph_paths, partial(progress, "Parity"))
    hidden = {case: run.tensors[HIDDEN_OUTPUT] for case, run in runs[embeddings_path(directory)].items()}
    contributions = None
    if (directory / CONTRIBUTIONS_PATH).is_file():
        contributions = measure_contributions(subject, hidden, partial(progress, "Contributions"))
    paths = [graph.path for graph in graphs_of(directory)]
    return (
        runs,
        contributions,
        measure_repeats(directory, paths, subject.config, partial(progress, "Repeated runs")),
    )
