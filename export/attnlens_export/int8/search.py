"""Which products to compute in int8, and how: the fastest choice that keeps the embeddings.

1. A product's loss is 1 - cosine of the embeddings, mean over the texts of a kind, with only it in int8, for
   the kind of text that loses most. It is measured on texts that nothing was calibrated with: what fits those
   best often clips others. Losses of different products add up, near enough, as their errors have little to
   do with each other. They are measured for units: the groups of one kind in neighbouring layers, in at most
   `MAX_UNITS` units, so that the time grows with the size of the model and not with its square.
2. A group's time is measured by itself, in each form, once for each set of sizes.
3. Each unit begins with its fastest method. Then, until the sum of losses fits the budget, the unit changes
   its method that saves most loss for the time that it costs.
4. What comes out is measured as a whole, and the budget made smaller or larger by how far it is from the
   gate, a few times. The fastest choice that passes is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from attnlens_export.graph.names import EMBEDDINGS_PATH
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import write_embedded, write_referring
from attnlens_export.int8.agreement import Agreement, Embedder, compare, run_all
from attnlens_export.int8.calibration import Activations, collect
from attnlens_export.int8.convert import to_int8
from attnlens_export.int8.products import Group, find_groups
from attnlens_export.int8.recipes import Method, Recipe, make_recipe, methods_for
from attnlens_export.int8.result import Gate
from attnlens_export.int8.sessions import measure_seconds, open_session
from attnlens_export.precision import Fp32Graph
from attnlens_export.progress import Progress

MAX_UNITS = 24
# Batches of each kind of text that the losses of units are measured on.
MAX_LOSS_BATCHES = 1
MAX_ROUNDS = 8
# The share of the gate that the first choice is made for: the losses of products do not quite add up.
FIRST_SHARE = 0.9
TIMED_SHAPE = (8, 64)
TIMED_REPETITIONS = 9
# A change that costs no time is worth more than any that does.
_NO_TIME = 1e-9

Plan = tuple[Method, ...]
"""The method of each unit."""
Figures = list[dict[Method, float]]
"""Losses or seconds of each unit, by method."""


@dataclass(frozen=True)
class Candidate:
    """A choice that was measured.

    Attributes:
        recipes: by source; groups that are not in it stay in fp32.
        graph: the result.
        use: the share of what the gate allows that is used up by the worst kind; at most 1 passes.
        agreement: with fp32.
        seconds: the sum of the times of its products.
    """

    recipes: dict[str, Recipe]
    graph: TracedGraph
    use: float
    agreement: Agreement
    seconds: float


class Search:
    """The search for one encoder."""

    def __init__(
        self,
        source: Fp32Graph,
        calibration: Mapping[str, Embedder],
        selection: Mapping[str, Embedder],
        progress: Progress,
    ) -> None:
        """Collect what goes into the products of `source`; the texts are given by kind."""
        self._source = source
        self._progress = progress
        path = source.directory / EMBEDDINGS_PATH
        self._folder = path.parent
        session = open_session(path)
        self._embedders = selection
        self._expected = run_all(selection, session)
        self._few = {kind: embedder.part(MAX_LOSS_BATCHES) for kind, embedder in selection.items()}
        self._few_expected = run_all(self._few, session)
        self._recipes: dict[tuple[str, Method], Recipe] = {}
        groups = find_groups(source.embeddings)
        self._activations = self._collect(groups, calibration)
        self._units = divide([group for group in groups if group.source in self._activations])
        self._figures: tuple[Figures, Figures] | None = None
        self.has_reliable_timings = True

    def run(self, gate: Gate) -> list[Candidate]:
        """Return the choices that were measured, whether they pass or not.

        The first call measures losses and times of products, later ones reuse them.
        """
        self._figures = self._figures or (self._losses(), self._seconds())
        losses, seconds = self._figures
        measured: dict[tuple[Method, ...], Candidate] = {}
        budget = FIRST_SHARE * (1 - gate.min_mean_cosine)
        enough, too_much = 0.0, np.inf  # the largest budget that passed, the smallest that failed
        for number in range(MAX_ROUNDS):
            self._progress("Int8 choices", "", number, MAX_ROUNDS)
            plan = choose(losses, seconds, budget)
            if set(plan) == {Method.FP32}:
                break
            if plan not in measured:
                measured[plan] = self._measure(plan, seconds, gate)
            use = measured[plan].use
            if use <= 1:
                enough = max(enough, budget)
            else:
                # Whatever budget has room for this plan would give it again.
                too_much = min(too_much, lost(plan, losses))
            # What is used up of the gate tells how far the sum of losses is from the loss of the whole.
            budget *= float(np.clip(1 / use, 0.3, 2.0))
            if not enough < budget < too_much:
                budget = float(np.sqrt(enough * too_much)) if enough else 0.9 * too_much
        return list(measured.values())

    def _open(self, graph: TracedGraph) -> onnxruntime.InferenceSession:
        """Open a graph that shares weights with `onnx/model.onnx`, beside which it is written meanwhile."""
        path = self._folder / ".candidate.onnx"
        write_referring(path, graph.proto, graph.weights, self._source.places)
        try:
            return open_session(path)
        finally:
            path.unlink()

    def _collect(
        self, groups: Sequence[Group], calibration: Mapping[str, Embedder]
    ) -> dict[str, Activations]:
        return collect(
            self._source.embeddings,
            groups,
            [embedder.batches for embedder in calibration.values()],
            self._folder,
            self._source.places,
            lambda done, total: self._progress("Int8 calibration", "", done, total),
        )

    def _recipe(self, group: Group, method: Method) -> Recipe:
        key = (group.source, method)
        if key not in self._recipes:
            activations = self._activations[group.source]
            self._recipes[key] = make_recipe(group, method, self._source.embeddings, activations)
        return self._recipes[key]

    def _losses(self) -> Figures:
        losses: Figures = [{Method.FP32: 0.0} for _ in self._units]
        steps = [
            (number, method)
            for number, unit in enumerate(self._units)
            for method in methods_for(unit[0])
            if method != Method.FP32
        ]
        for step, (number, method) in enumerate(steps):
            self._progress("Int8 sensitivity of each product", "", step, len(steps))
            recipes = {group.source: self._recipe(group, method) for group in self._units[number]}
            session = self._open(to_int8(self._source.embeddings, recipes))
            found = compare(run_all(self._few, session), self._few_expected)
            loss = np.max([1 - kind.mean_cosine for kind in found.kinds.values()])
            # What a NaN came from must not be chosen.
            losses[number][method] = float(np.nan_to_num(max(loss, 0.0), nan=2.0))
        return losses

    def _seconds(self) -> Figures:
        known: dict[tuple[object, ...], dict[Method, float]] = {}
        seconds: Figures = [dict.fromkeys(methods_for(unit[0]), 0.0) for unit in self._units]
        for number, unit in enumerate(self._units):
            self._progress("Int8 times of each product", "", number, len(self._units))
            for group in unit:
                shapes = (self._source.embeddings.weights[name].shape for name in group.weights)
                sizes = (methods_for(group), *shapes)
                if sizes not in known:
                    known[sizes] = self._time(group)
                for method, each in known[sizes].items():
                    seconds[number][method] += each
        return seconds

    def _time(self, group: Group) -> dict[Method, float]:
        alone = only(group, self._source.embeddings)
        sessions: dict[str, onnxruntime.InferenceSession] = {}
        for method in methods_for(group):
            is_exact = method == Method.FP32
            graph = alone if is_exact else to_int8(alone, {group.source: self._recipe(group, method)})
            path = self._folder / ".timed.onnx"
            write_embedded(path, graph.proto, graph.weights)
            sessions[method] = open_session(path, threads=1)
            path.unlink()
        shape = (*TIMED_SHAPE, graph_width(group, self._source.embeddings))
        value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        timings = measure_seconds(sessions, {group.source: value}, TIMED_REPETITIONS)
        self.has_reliable_timings &= timings.is_reliable
        return {method: timings.seconds[method] for method in methods_for(group)}

    def _measure(self, plan: Plan, seconds: Figures, gate: Gate) -> Candidate:
        recipes = {
            group.source: self._recipe(group, method)
            for unit, method in zip(self._units, plan, strict=True)
            if method != Method.FP32
            for group in unit
        }
        graph = to_int8(self._source.embeddings, recipes)
        session = self._open(graph)
        found = compare(run_all(self._embedders, session), self._expected)
        total = sum(each[method] for each, method in zip(seconds, plan, strict=True))
        return Candidate(recipes, graph, gate.use(found), found, total)


def divide(groups: Sequence[Group]) -> list[list[Group]]:
    """Return units: groups of one kind in neighbouring layers, as few together as `MAX_UNITS` allows."""
    kinds: dict[str, list[Group]] = {}
    for group in groups:
        kinds.setdefault(group.kind, []).append(group)
    units = []
    for members in kinds.values():
        num_units = min(len(members), max(1, MAX_UNITS // len(kinds)))
        edges = np.linspace(0, len(members), num_units + 1).round().astype(int)
        units += [members[start:end] for start, end in pairwise(edges)]
    return units


def choose(losses: Figures, seconds: Figures, budget: float) -> Plan:
    """Return a fast plan whose losses add up to at most `budget`."""
    plan = [min(times, key=lambda method: times[method]) for times in seconds]

    def gain(change: tuple[int, Method]) -> float:
        """Return the loss that a change saves for each second that it costs."""
        unit, method = change
        saved = losses[unit][plan[unit]] - losses[unit][method]
        return saved / max(seconds[unit][method] - seconds[unit][plan[unit]], _NO_TIME)

    while lost(plan, losses) > budget:
        # There is one as long as anything is lost: fp32 loses nothing.
        unit, method = max(_savings(plan, losses), key=gain)
        plan[unit] = method
    return tuple(plan)


def lost(plan: Sequence[Method], losses: Figures) -> float:
    """Return the sum of a plan's losses."""
    return sum(each[method] for each, method in zip(losses, plan, strict=True))


def _savings(plan: Sequence[Method], losses: Figures) -> Iterator[tuple[int, Method]]:
    """Yield each change of one unit that loses less."""
    for unit, chosen in enumerate(plan):
        for method, loss in losses[unit].items():
            if loss < losses[unit][chosen]:
                yield unit, method


def only(group: Group, graph: TracedGraph) -> TracedGraph:
    """Return a graph of a group by itself: its source is the input, its results are the outputs."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    for field in ("node", "input", "output", "value_info"):
        proto.graph.ClearField(field)
    proto.graph.node.extend(node for node in graph.proto.graph.node if node.output[0] in group.results)
    width = graph_width(group, graph)
    proto.graph.input.append(
        helper.make_tensor_value_info(group.source, TensorProto.FLOAT, ["B", "T", width])
    )
    proto.graph.output.extend(
        helper.make_tensor_value_info(result, TensorProto.FLOAT, ["B", "T", graph.weights[weight].shape[1]])
        for result, weight in zip(group.results, group.weights, strict=True)
    )
    return TracedGraph(proto, {name: graph.weights[name] for name in group.weights})


def graph_width(group: Group, graph: TracedGraph) -> int:
    """Return K."""
    return int(graph.weights[group.weights[0]].shape[0])
