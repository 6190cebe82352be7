"""The grid of parity in an engine: embeddings in each precision, attention and contributions in fp32.

PyTorch runs each case once for all graphs. What a graph can't do (the engine refuses it, crashes, does not
answer) ends the measurement of that graph and is a failure.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from attnlens.dense import open_layers
from attnlens.openvino_settings import OpenvinoPrecision
from attnlens.v1.manifest_pb2 import Gate, GateKind, OutputRole
from attnlens_export.contributions.measure import measure_case
from attnlens_export.contributions.result import Completeness, ContributionsResult
from attnlens_export.engines.engine import Engine
from attnlens_export.engines.result import Part, broken
from attnlens_export.errors import EngineError
from attnlens_export.graph.names import (
    ATTENTIONS_PATH,
    CONTRIBUTIONS_PATH,
    EMBEDDINGS_PATH,
    HIDDEN_OUTPUT,
    graph_id,
)
from attnlens_export.parity.grid import Case, Inputs
from attnlens_export.parity.measure import Subject, compare_case, run_case
from attnlens_export.parity.reference import run_fp32
from attnlens_export.parity.result import Invariants, Measurement, ParityResult, summarize
from attnlens_export.parity.ties import make_clear_inputs
from attnlens_export.progress import StageProgress
from attnlens_export.published.pooling import read_pooling
from attnlens_export.runtimes.graph import ProcessGraph
from attnlens_export.runtimes.result import MIN_COSINE
from attnlens_runtimes import RuntimeFailureError

_Label = str
"""Of a graph as it was opened: a precision of the embeddings, or the path of another graph."""


@dataclass(frozen=True)
class GridResult:
    """What the grid says.

    Attributes:
        processor: its own name, as the engine tells it.
        embeddings: by precision, of those that compute the graph in fp32.
        others: of attention and contributions, which do not depend on the precision of embeddings.
    """

    processor: str
    embeddings: Mapping[OpenvinoPrecision, Part]
    others: tuple[Part, ...]


@dataclass
class _Found:
    """What was measured until now, by label."""

    measurements: dict[_Label, list[Measurement]] = field(default_factory=lambda: defaultdict(list))
    invariants: dict[_Label, list[Invariants]] = field(default_factory=lambda: defaultdict(list))
    contributions: list[Completeness] = field(default_factory=list)
    stops: dict[_Label, str] = field(default_factory=dict)


def measure_grid(
    subject: Subject, engine: Engine, precisions: Sequence[OpenvinoPrecision], progress: StageProgress
) -> GridResult:
    """Run every case through every graph.

    Args:
        subject: the bundle and its reference.
        engine: where the graphs run.
        precisions: of the embeddings; int8 is left out, whose gates are on texts.
        progress: called before each case.

    Raises:
        EngineError: no graph opens.
    """
    in_fp32: list[OpenvinoPrecision] = [precision for precision in precisions if precision != "int8"]
    wanted: dict[_Label, tuple[str, OpenvinoPrecision]] = {
        precision: (EMBEDDINGS_PATH, precision) for precision in in_fp32
    }
    wanted[ATTENTIONS_PATH] = (ATTENTIONS_PATH, "fp32")
    if (subject.directory / CONTRIBUTIONS_PATH).is_file():
        wanted[CONTRIBUTIONS_PATH] = (CONTRIBUTIONS_PATH, "fp32")
    found = _Found()
    with ExitStack() as processes:
        graphs = {}
        for label, (path, precision) in wanted.items():
            progress(f"opening {path}", 0, len(subject.cases))
            try:
                graphs[label] = engine.open(subject.directory, path, subject.config, processes, precision)
            except RuntimeFailureError as error:
                found.stops[label] = f"does not open: {error}"
        if not graphs:
            raise EngineError(f"{EMBEDDINGS_PATH} {next(iter(found.stops.values()))}")
        processor = next(iter(graphs.values())).processor
        for number, case in enumerate(subject.cases):
            progress(str(case), number, len(subject.cases))
            _run_case(subject, case, graphs, found)
    progress("", len(subject.cases), len(subject.cases))
    embeddings = {precision: _embeddings(subject, precision, found) for precision in in_fp32}
    others = (_exact(subject, ATTENTIONS_PATH, ATTENTIONS_PATH, found), _contributions(found))
    return GridResult(processor, embeddings, others)


def _run_case(subject: Subject, case: Case, graphs: Mapping[_Label, ProcessGraph], found: _Found) -> None:
    inputs = make_clear_inputs(case, subject.config, subject.encoder)
    runs = {}
    for label, graph in graphs.items():
        is_left_out = graph.path == ATTENTIONS_PATH and not case.with_attentions
        if label in found.stops or graph.path == CONTRIBUTIONS_PATH or is_left_out:
            continue
        try:
            runs[label] = run_case(graph, case, inputs, subject.config)
        except RuntimeFailureError as error:
            found.stops[label] = f"stopped at {case}: {error}"
        else:
            found.invariants[label].append(runs[label].invariants)
    if runs:
        for measurement in compare_case(subject, case, inputs, runs):
            path = graphs[measurement.graph].path
            found.measurements[measurement.graph].append(replace(measurement, graph=path))
    if CONTRIBUTIONS_PATH in graphs and CONTRIBUTIONS_PATH not in found.stops and case.with_attentions:
        _run_contributions(subject, case, inputs, graphs[CONTRIBUTIONS_PATH], found)


def _run_contributions(
    subject: Subject, case: Case, inputs: Inputs, graph: ProcessGraph, found: _Found
) -> None:
    directory, config = subject.directory, subject.config
    dense = open_layers(directory, read_pooling(directory, config.vector_size).dense, config.vector_size)
    hidden = run_fp32(subject.encoder, inputs, with_attentions=False)[HIDDEN_OUTPUT]
    try:
        found.contributions.append(measure_case(graph.run_feed, case, inputs, config, hidden, dense))
    except RuntimeFailureError as error:
        found.stops[CONTRIBUTIONS_PATH] = f"stopped at {case}: {error}"


def _embeddings(subject: Subject, precision: OpenvinoPrecision, found: _Found) -> Part:
    """Return the part of the token vectors of the graph of embeddings."""
    if precision == "fp32":
        return _exact(subject, precision, EMBEDDINGS_PATH, found)
    stops = _stops(precision, EMBEDDINGS_PATH, found)
    measurements = found.measurements[precision]
    if not measurements:
        return Part(failures=stops)
    figure = summarize(measurements)
    gate = Gate(
        graph=graph_id(EMBEDDINGS_PATH),
        role=OutputRole.OUTPUT_ROLE_LAST_HIDDEN_STATE,
        kind=GateKind.GATE_KIND_MIN_COSINE,
        limit=MIN_COSINE,
        value=figure.min_cosine,
    )
    wrong = tuple(line for each in found.invariants[precision] for line in each.failures())
    return Part((gate,), (figure,), (*stops, *broken(EMBEDDINGS_PATH, [gate]), *wrong))


def _exact(subject: Subject, label: _Label, path: str, found: _Found) -> Part:
    """Return the part of a graph in fp32, which has the gates of the bundle's own parity."""
    parity = ParityResult(
        tuple(subject.cases),
        tuple(found.measurements[label]),
        tuple(found.invariants[label]),
        subject.reference_name,
        subject.config.max_tokens,
    )
    return Part(
        tuple(parity.gates()),
        tuple(parity.figures()),
        (*_stops(label, path, found), *parity.failures()),
    )


def _contributions(found: _Found) -> Part:
    stops = _stops(CONTRIBUTIONS_PATH, CONTRIBUTIONS_PATH, found)
    if not found.contributions:
        return Part(failures=stops)
    result = ContributionsResult(tuple(found.contributions))
    return Part(tuple(result.gates()), (), (*stops, *result.failures()))


def _stops(label: _Label, path: str, found: _Found) -> tuple[str, ...]:
    return (f"{path}: {found.stops[label]}",) if label in found.stops else ()
