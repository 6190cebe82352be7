"""Search for the fastest combination of int8 methods that passes the gate.

1. The groups are divided into at most `MAX_UNITS` units. A unit contains groups of one kind in adjacent
   layers. A limited number of units keeps the search time proportional to the size of the model.
2. Each unit has a loss for each method if only this unit is in int8. It is 1 - mean cosine of the embeddings,
   or the mean squared error of a classifier's logits, for the kind of text with the largest loss. It is
   measured on texts that were not used for calibration: the method that fits the calibration texts best often
   clips values in other texts. The errors of units are almost independent, so their losses approximately add
   up.
3. The time of a group is measured separately for each method, once for each combination of sizes.
4. A plan starts with the fastest method of each unit. While the sum of losses exceeds the budget, switch the
   unit whose change of method reduces the loss most per additional second. A loss is measured when the choice
   first depends on it, and only for as many kinds of text as decide it, since each runs the encoder.
5. The graph of the plan is measured. The budget is then adjusted according to the distance of the result from
   the gate, up to `MAX_ROUNDS` times.

Shapes: B texts in a batch, T tokens, K width of an input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from attnlens_export.graph.names import EMBEDDINGS_PATH
from attnlens_export.graph.trace import TracedGraph
from attnlens_export.graph.write import write_embedded, write_referring
from attnlens_export.int8.calibration import collect
from attnlens_export.int8.convert import to_int8
from attnlens_export.int8.recipes import (
    Activations,
    Group,
    Method,
    Recipe,
    find_groups,
    make_recipe,
    methods_for,
)
from attnlens_export.int8.result import AccuracyGate
from attnlens_export.int8.resume import Resumption
from attnlens_export.int8.texts import Agreement, TextRunner, compare_all, run_all
from attnlens_export.parity.sessions import measure_seconds, open_session
from attnlens_export.precision import Fp32Graph
from attnlens_export.progress import Progress

MAX_UNITS = 24
# Number of batches of each kind of text on which the loss of a unit is measured.
MAX_LOSS_BATCHES = 1
MAX_ROUNDS = 8
# Share of the loss allowed by the gate that the first plan may use, since losses add up only approximately.
FIRST_SHARE = 0.9
TIMED_SHAPE = (8, 64)
TIMED_REPETITIONS = 9
# A change that costs no time is preferred to all others.
_NO_TIME = 1e-9

Plan = tuple[Method, ...]
"""Method of each unit."""
Costs = Sequence[dict[Method, float]]
"""Losses or seconds of each unit, by method."""


class Losses(dict[Method, float]):
    """Losses of a unit by method, each measured when it is first read.

    Args:
        measure: Returns the loss of a method, or a smaller value that is at least the second argument.

    Attributes:
        lower: Lower limits of losses that are not known yet.
    """

    def __init__(self, measure: Callable[[Method, float], float]) -> None:
        super().__init__({Method.FP32: 0.0})
        self._measure = measure
        self.lower: dict[Method, float] = {}

    def __missing__(self, method: Method) -> float:
        self[method] = self._measure(method, np.inf)
        return self[method]

    def is_below(self, method: Method, limit: float) -> bool:
        """Return whether the loss of a method is below a limit. This takes less time than to read it."""
        if method in self:
            return self[method] < limit
        if self.lower.get(method, 0.0) >= limit:
            return False
        loss = self._measure(method, limit)
        (self if loss < limit else self.lower)[method] = loss
        return loss < limit


@dataclass(frozen=True)
class Candidate:
    """A plan that was measured as a whole graph.

    Attributes:
        recipes: Recipes by source. Other groups stay in fp32.
        graph: Graph in int8.
        used_share: Share of the loss allowed by the gate, for the worst kind of text. The plan passes if it
            is at most 1.
        agreement: Figures of the comparison with the graph in fp32.
        seconds: Total time of all matrix products.
    """

    recipes: dict[str, Recipe]
    graph: TracedGraph
    used_share: float
    agreement: Agreement
    seconds: float


class Search:
    """Search for one encoder.

    Attributes:
        has_reliable_timings: Whether repeated time measurements agreed.
    """

    def __init__(
        self,
        source: Fp32Graph,
        calibration: Mapping[str, TextRunner[Any]],
        selection: Mapping[str, TextRunner[Any]],
        progress: Progress,
    ) -> None:
        """Run the calibration. `calibration` and `selection` map kinds of text to their texts."""
        self._source = source
        self._progress = progress
        path = source.directory / EMBEDDINGS_PATH
        self._folder = path.parent
        session = open_session(path)
        self._runners = selection
        self._expected = run_all(selection, session)
        self._few = {kind: runner.sample(MAX_LOSS_BATCHES) for kind, runner in selection.items()}
        self._few_expected = run_all(self._few, session)
        self._recipes: dict[tuple[str, Method], Recipe] = {}
        groups = find_groups(source.embeddings)
        self._activations = self._collect(groups, calibration)
        self._units = divide([group for group in groups if group.source in self._activations])
        self._resumption = Resumption(
            source.embeddings,
            [group.source for unit in self._units for group in unit],
            [batch for runner in self._few.values() for batch in runner.batches],
            self._open,
        )
        self._losses = [Losses(partial(self._measure_loss, unit)) for unit in range(len(self._units))]
        # Kinds of text in the order in which the loss of a unit is measured.
        self._kinds = [list(self._few) for _ in self._units]
        self._seconds: Costs | None = None
        self.has_reliable_timings = True

    def run(self, gate: AccuracyGate) -> list[Candidate]:
        """Return all measured plans, whether they pass the gate or not.

        The first call measures times. Losses and times are measured only once.
        """
        self._seconds = self._seconds or self._measure_seconds()
        losses, seconds = self._losses, self._seconds
        measured: dict[tuple[Method, ...], Candidate] = {}
        budget = FIRST_SHARE * gate.allowed_loss
        passing, failing = 0.0, np.inf  # largest budget that passed, smallest budget that failed
        for index in range(MAX_ROUNDS):
            self._progress("Int8 choices", "", index, MAX_ROUNDS)
            plan = choose(losses, seconds, budget)
            if set(plan) == {Method.FP32}:
                break
            if plan not in measured:
                measured[plan] = self._measure(plan, seconds, gate)
            used_share = measured[plan].used_share
            if used_share <= 1:
                passing = max(passing, budget)
            else:
                # Any budget at or above this loss would result in the same plan.
                failing = min(failing, total_loss(plan, losses))
            # Correct for the difference between the sum of losses and the loss of the whole graph.
            budget *= float(np.clip(1 / used_share, 0.3, 2.0))
            if not passing < budget < failing:
                budget = float(np.sqrt(passing * failing)) if passing else 0.9 * failing
        return list(measured.values())

    def _open(self, graph: TracedGraph) -> onnxruntime.InferenceSession:
        """Open a graph that shares weights with `onnx/model.onnx`. A temporary file is written next to it."""
        path = self._folder / ".candidate.onnx"
        write_referring(path, graph.proto, graph.weights, self._source.places)
        try:
            return open_session(path)
        finally:
            path.unlink()

    def _collect(
        self, groups: Sequence[Group], calibration: Mapping[str, TextRunner[Any]]
    ) -> dict[str, Activations]:
        return collect(
            self._source.embeddings,
            groups,
            [runner.batches for runner in calibration.values()],
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

    def _measure_loss(self, unit: int, method: Method, limit: float) -> float:
        """Return the loss if only one unit is in int8, or that of the first kinds if it reaches the limit."""
        done = sum(len(losses) - 1 for losses in self._losses)
        total = sum(len(methods_for(groups[0])) - 1 for groups in self._units)
        self._progress("Measuring the sensitivity of matrix products", "", done, total)
        recipes = {group.source: self._recipe(group, method) for group in self._units[unit]}
        session = self._resumption.open(self._convert(recipes))
        largest, kinds = 0.0, self._kinds[unit]
        for kind in list(kinds):
            loss = compare_all({kind: self._few[kind]}, session, self._few_expected).loss
            # A method that returns NaN gets the largest possible loss.
            loss = float(np.nan_to_num(loss, nan=2.0))
            if loss > largest:
                largest = loss
                # The same kind is likely to have the largest loss for the next method.
                kinds.remove(kind)
                kinds.insert(0, kind)
            if largest >= limit:
                break
        return largest

    def _measure_seconds(self) -> Costs:
        known: dict[tuple[object, ...], dict[Method, float]] = {}
        seconds: Costs = [dict.fromkeys(methods_for(unit[0]), 0.0) for unit in self._units]
        for index, unit in enumerate(self._units):
            self._progress("Timing matrix products in int8", "", index, len(self._units))
            for group in unit:
                shapes = (self._source.embeddings.weights[name].shape for name in group.weights)
                sizes = (methods_for(group), *shapes)
                if sizes not in known:
                    known[sizes] = self._time(group)
                for method, group_seconds in known[sizes].items():
                    seconds[index][method] += group_seconds
        return seconds

    def _time(self, group: Group) -> dict[Method, float]:
        fp32 = extract(group, self._source.embeddings)
        sessions: dict[str, onnxruntime.InferenceSession] = {}
        for method in methods_for(group):
            is_fp32 = method == Method.FP32
            graph = fp32 if is_fp32 else to_int8(fp32, {group.source: self._recipe(group, method)})
            path = self._folder / ".timed.onnx"
            write_embedded(path, graph.proto, graph.weights)
            sessions[method] = open_session(path, threads=1)
            path.unlink()
        shape = (*TIMED_SHAPE, input_width(group, self._source.embeddings))
        value = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        timings = measure_seconds(sessions, {group.source: value}, TIMED_REPETITIONS)
        self.has_reliable_timings &= timings.is_reliable
        return {method: timings.seconds[method] for method in methods_for(group)}

    def _convert(self, recipes: Mapping[str, Recipe]) -> TracedGraph:
        """Return the graph to write, with the head of a classifier in fp32."""
        return self._source.complete(to_int8(self._source.embeddings, recipes))

    def _measure(self, plan: Plan, seconds: Costs, gate: AccuracyGate) -> Candidate:
        recipes = {
            group.source: self._recipe(group, method)
            for unit, method in zip(self._units, plan, strict=True)
            if method != Method.FP32
            for group in unit
        }
        graph = self._convert(recipes)
        agreement = compare_all(self._runners, self._open(graph), self._expected)
        total = sum(by_method[method] for by_method, method in zip(seconds, plan, strict=True))
        return Candidate(recipes, graph, gate.used_share(agreement), agreement, total)


def divide(groups: Sequence[Group]) -> list[list[Group]]:
    """Divide groups into about `MAX_UNITS` units of one kind in adjacent layers."""
    kinds: dict[str, list[Group]] = {}
    for group in groups:
        kinds.setdefault(group.kind, []).append(group)
    units = []
    for members in kinds.values():
        num_units = min(len(members), max(1, MAX_UNITS // len(kinds)))
        edges = np.linspace(0, len(members), num_units + 1).round().astype(int)
        units += [members[start:end] for start, end in pairwise(edges)]
    return units


def choose(losses: Sequence[Losses], seconds: Costs, budget: float) -> Plan:
    """Return a fast plan with a total loss of at most `budget`."""
    plan = [min(times, key=lambda method: times[method]) for times in seconds]
    while total_loss(plan, losses) > budget:
        # If the loss is not 0, there is always a change, since the loss of fp32 is 0.
        unit, method = _best_change(plan, losses, seconds)
        plan[unit] = method
    return tuple(plan)


def _best_change(plan: Sequence[Method], losses: Sequence[Losses], seconds: Costs) -> tuple[int, Method]:
    """Return the change of a unit's method that reduces the loss most per additional second.

    Changes are compared in the order of their largest possible gain. Losses that can't change the result are
    not measured.
    """

    def extra_seconds(unit: int, method: Method) -> float:
        return max(seconds[unit][method] - seconds[unit][plan[unit]], _NO_TIME)

    def largest_gain(change: tuple[int, Method]) -> float:
        unit, method = change
        of_unit = losses[unit]
        lowest = of_unit.get(method, of_unit.lower.get(method, 0.0))
        return (of_unit[plan[unit]] - lowest) / extra_seconds(unit, method)

    changes = [(unit, method) for unit, times in enumerate(seconds) for method in times]
    best, best_gain = changes[0], 0.0
    for change in sorted(changes, key=largest_gain, reverse=True):
        unit, method = change
        if largest_gain(change) <= best_gain:
            break
        limit = losses[unit][plan[unit]] - best_gain * extra_seconds(unit, method)
        if losses[unit].is_below(method, limit) and largest_gain(change) > best_gain:
            best, best_gain = change, largest_gain(change)
    return best


def total_loss(plan: Sequence[Method], losses: Costs) -> float:
    """Return the sum of the losses of all units."""
    return sum(by_method[method] for by_method, method in zip(losses, plan, strict=True))


def extract(group: Group, graph: TracedGraph) -> TracedGraph:
    """Return a graph of one group, with its source as input and its results as outputs."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    for field in ("node", "input", "output", "value_info"):
        proto.graph.ClearField(field)
    proto.graph.node.extend(node for node in graph.proto.graph.node if node.output[0] in group.results)
    width = input_width(group, graph)
    proto.graph.input.append(
        helper.make_tensor_value_info(group.source, TensorProto.FLOAT, ["B", "T", width])
    )
    proto.graph.output.extend(
        helper.make_tensor_value_info(result, TensorProto.FLOAT, ["B", "T", graph.weights[weight].shape[1]])
        for result, weight in zip(group.results, group.weights, strict=True)
    )
    return TracedGraph(proto, {name: graph.weights[name] for name in group.weights})


def input_width(group: Group, graph: TracedGraph) -> int:
    """Return K."""
    return int(graph.weights[group.weights[0]].shape[0])
