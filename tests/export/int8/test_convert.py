"""Conversion from fp32 to int8: contents and accuracy of the graph."""

import csv
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.int8.calibration import collect
from attnlens_export.int8.convert import to_int8
from attnlens_export.int8.recipes import (
    Activations,
    Group,
    InputRange,
    Method,
    Recipe,
    find_groups,
    make_recipe,
    round_inputs,
    round_weights,
)
from attnlens_export.int8.resume import Resumption
from attnlens_export.int8.texts import (
    Batch,
    Embedder,
    compare,
    make_batches,
    max_batch_difference,
    read_kinds,
    run_all,
    split_texts,
)
from attnlens_export.parity.grid import Inputs
from attnlens_export.parity.sessions import open_session
from attnlens_export.published.pooling import read_pooling
from attnlens_model import load_checkpoint
from family_cases import EXPORTED

STSB = Path(__file__).parents[2] / "data" / "stsb-en-dev.csv"
# A product of the table of relative positions, which is not a row for each token; one weight for two layers;
# a norm before the products that is theirs alone.
FAMILIES = ("deberta_v2", "albert", "eurobert")


@dataclass(frozen=True)
class Written:
    """A graph and the inputs of its matrix products."""

    graph: TracedGraph
    path: Path
    activations: dict[str, Activations]

    def recipe(self, group: Group, method: Method) -> Recipe:
        return make_recipe(group, method, self.graph, self.activations[group.source])

    def convert(self, recipes: list[Recipe]) -> tuple[onnxruntime.InferenceSession, onnx.ModelProto]:
        """Return the int8 graph, and the graph optimized by ONNX Runtime."""
        graph = to_int8(self.graph, {recipe.group.source: recipe for recipe in recipes})
        path, optimized = self.path.with_name("int8.onnx"), self.path.with_name("optimized.onnx")
        write_embedded(path, graph.proto, graph.weights)
        onnx.checker.check_model(path, full_check=True)
        return open_session(path, optimized_path=optimized), onnx.load(optimized)


def write_graph(graph: TracedGraph, kinds: Sequence[Sequence[Batch]], directory: Path) -> Written:
    path = directory / "model.onnx"
    places = write_embedded(path, graph.proto, graph.weights)
    found = collect(graph, find_groups(graph), kinds, directory, places, lambda *_: None)
    return Written(graph, path, found)


def random_batches(vocab_size: int, *, types: bool, seed: int = 0) -> list[Batch]:
    """Eight texts of 5 to 33 tokens each, padded right, in three batches."""
    generator = np.random.default_rng(seed)
    batches = []
    for _ in range(3):
        lengths = [33, *generator.integers(5, 33, 7)]
        mask = (np.arange(33)[None] < np.array(lengths)[:, None]).astype(np.int64)
        ids = np.where(mask == 1, generator.integers(3, vocab_size, mask.shape), 0)
        batches.append(Batch(Inputs(ids, mask, np.zeros_like(ids) if types else None), tuple(range(8))))
    return batches


def integer_products(model: onnx.ModelProto) -> int:
    return Counter(node.op_type for node in model.graph.node)["MatMulIntegerToFloat"]


@dataclass(frozen=True)
class MiniLM:
    """MiniLM's graph, embedders of the texts that judge it, and of other real texts."""

    written: Written
    kinds: dict[str, Embedder]
    others: dict[str, Embedder]


@pytest.fixture(scope="module")
def minilm(minilm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MiniLM:
    checkpoint = load_checkpoint(minilm_dir)
    pooling = read_pooling(minilm_dir, 384)

    def embedders(kinds: dict[str, list[str]]) -> dict[str, Embedder]:
        tokenizer = minilm_dir / "tokenizer.json"
        return {
            kind: Embedder(minilm_dir, pooling, 384, make_batches(texts, tokenizer, checkpoint.config, 256))
            for kind, texts in kinds.items()
        }

    sets = {kind: split_texts(texts) for kind, texts in read_kinds(None).items()}
    calibration = embedders({kind: split.calibration for kind, split in sets.items()})
    with STSB.open(encoding="utf-8", newline="") as file:
        sentences = [row[0] for row in itertools.islice(csv.reader(file), 0, 1500, 7)]
    words = sorted({word for sentence in sentences for word in re.findall(r"\w+", sentence)})[::5]
    others = embedders({"sentences": sentences, "words": words, "empty": [""]})
    graph = embeddings_graph(trace(checkpoint.encoder, checkpoint.config))
    directory = tmp_path_factory.mktemp("minilm_int8")
    written = write_graph(graph, [each.batches for each in calibration.values()], directory)
    return MiniLM(written, embedders({kind: split.judgement for kind, split in sets.items()}), others)


@pytest.mark.extended
def test_minilm_keeps_the_embeddings_of_every_kind_of_text(minilm: MiniLM) -> None:
    """Everything in int8 except the values and the operations after them, which lose most accuracy."""
    methods = {"query": Method.EXACT_VALUES, "up": Method.EXACT_COLUMNS, "down": Method.EXACT_COLUMNS}
    recipes = [
        minilm.written.recipe(group, method)
        for group in find_groups(minilm.written.graph)
        for part, method in methods.items()
        if f".{part}." in group.weights[0]
    ]
    session, optimized = minilm.written.convert(recipes)
    exact = open_session(minilm.written.path)
    for embedders in (minilm.kinds, minilm.others):
        found = compare(run_all(embedders, session), run_all(embedders, exact))
        for kind in found.recorded.text_kinds:
            assert kind.mean_cosine >= 0.999
            assert kind.min_cosine >= 0.99
        assert found.recorded.neighbor_agreement >= 0.9
    # Products are computed on integers, and results do not depend on the batch.
    assert integer_products(optimized) == 24
    assert max_batch_difference(session, minilm.others["sentences"].batches[::4]) == 0


@pytest.mark.extended
def test_largest_errors_of_minilm_come_from_the_documented_products(minilm: MiniLM) -> None:
    few = {"sentences": minilm.kinds["sentences"]}
    expected = run_all(few, open_session(minilm.written.path))
    groups = {group.weights[0]: group for group in find_groups(minilm.written.graph)}

    def loss(weight: str, method: Method) -> float:
        session, _ = minilm.written.convert([minilm.written.recipe(groups[weight], method)])
        return compare(run_all(few, session), expected).loss

    query, down = "layers.5.attention.query.weight.T", "layers.0.feed_forward.down.weight.T"
    assert loss(query, Method.SMOOTHED) < 0.5 * loss(query, Method.PLAIN)
    assert loss(query, Method.EVENED) < loss(query, Method.SMOOTHED)
    assert loss(query, Method.EXACT_VALUES) < 0.5 * loss(query, Method.SMOOTHED)
    assert loss(down, Method.EXACT_COLUMNS) < 0.5 * loss(down, Method.SMOOTHED)


@pytest.mark.extended
def test_short_text_counts_as_much_as_a_long_one(minilm: MiniLM) -> None:
    """And a kind of few texts as much as one of many."""
    graph, directory = minilm.written.graph, minilm.written.path.parent
    first, second = find_groups(graph)[:2]
    places = write_embedded(directory / "counted.onnx", graph.proto, graph.weights)

    def means(*kinds: list[Batch]) -> list[np.ndarray]:
        found = collect(graph, [first, second], kinds, directory, places, lambda *_: None)
        return [found[group.source].covariance for group in (first, second)]

    long, short = list(minilm.kinds["prose"].batches[:1]), list(minilm.kinds["very_short"].batches[:1])
    for both, each, other in zip(means(long, short), means(long), means(short), strict=True):
        assert np.allclose(both, (each + other) / 2, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_converts(family: str, tmp_path: Path) -> None:
    EXPORTED[family].make().save_pretrained(tmp_path / "source")
    checkpoint = load_checkpoint(tmp_path / "source")
    graph = embeddings_graph(trace(checkpoint.encoder, checkpoint.config))
    batches = random_batches(
        checkpoint.config.embeddings.vocab_size, types=checkpoint.config.embeddings.type_vocab_size > 1
    )
    written = write_graph(graph, [batches], tmp_path)
    groups = [group for group in find_groups(graph) if group.source in written.activations]
    methods = itertools.cycle([Method.SMOOTHED, Method.EXACT_COLUMNS, Method.PLAIN])
    recipes = [written.recipe(group, method) for group, method in zip(groups, methods, strict=False)]
    session, optimized = written.convert(recipes)
    assert integer_products(optimized) == sum(len(group.results) for group in groups)
    exact = open_session(written.path)
    for batch in random_batches(
        checkpoint.config.embeddings.vocab_size, types=batches[0].inputs.token_type_ids is not None, seed=1
    ):
        ours, expected = (each.run(None, batch.inputs.feed())[0] for each in (session, exact))
        live = batch.inputs.attention_mask == 1
        norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(expected, axis=-1)
        cosines = ((ours * expected).sum(axis=-1) / norms)[live]
        # Random weights: a value beyond those of the calibration, which is cut off, is not rare.
        assert cosines.mean() > 0.995
        assert cosines.min() > 0.9
        assert np.abs(ours - expected)[live].max() > 1e-5  # it is not the fp32 graph
    assert max_batch_difference(session, batches) <= 1e-5
    left_out = {"albert": 0, "eurobert": 0, "deberta_v2": 1}
    assert len(find_groups(graph)) - len(groups) == left_out[family]
    # Smoothing costs a node only where the norm before is read by others too: not in front of a layer of
    # EuroBERT, nor behind the embeddings of ALBERT.
    num_factors = sum(
        node.op_type == "Mul" and "_factors" in node.input[1]
        for node in onnx.load(tmp_path / "int8.onnx").graph.node
    )
    num_smoothed = sum(recipe.divisors is not None for recipe in recipes)
    assert num_smoothed
    assert (num_factors < num_smoothed) == (family in {"albert", "eurobert"})


@pytest.mark.parametrize("max_bytes", [2**29, 2**10])
@pytest.mark.parametrize("family", [*FAMILIES, "roberta"])
def test_run_from_saved_values_returns_the_same_bits(
    family: str, max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnlens_export.int8.resume.MAX_SAVED_BYTES", max_bytes)
    odd = EXPORTED[family]
    # ONNX Runtime fuses the tanh form of ALBERT's GELU, which changes last bits, unless its result is saved.
    changes = odd.changes | {"hidden_act": "gelu"} if family == "albert" else odd.changes
    dataclasses.replace(odd, changes=changes).make().save_pretrained(tmp_path / "source")
    checkpoint = load_checkpoint(tmp_path / "source")
    graph = embeddings_graph(trace(checkpoint.encoder, checkpoint.config))
    vocab_size = checkpoint.config.embeddings.vocab_size
    batches = random_batches(vocab_size, types=checkpoint.config.embeddings.type_vocab_size > 1)
    written = write_graph(graph, [batches], tmp_path)
    groups = [group for group in find_groups(graph) if group.source in written.activations]
    opened: list[int] = []

    def open_graph(part: TracedGraph) -> onnxruntime.InferenceSession:
        opened.append(len(part.proto.graph.node))
        return open_session(part.proto_with_weights().SerializeToString(), threads=1)

    resumption = Resumption(graph, [group.source for group in groups], batches, open_graph)
    saved_bytes = sum(array.nbytes for values in resumption.saved.values() for array in values.values())
    assert saved_bytes <= max_bytes
    shares = []
    for group in groups:
        changed = to_int8(graph, {group.source: written.recipe(group, Method.SMOOTHED)})
        resumed, whole = resumption.open(changed), open_graph(changed)
        shares.append(opened[-2] / opened[-1])
        for batch in batches:
            expected, found = (
                each.run(["last_hidden_state"], batch.inputs.feed()) for each in (whole, resumed)
            )
            assert np.array_equal(found[0], expected[0])
    # With little memory, the whole graph runs.
    assert (min(shares) < 0.7) == (max_bytes == 2**29)


def test_rounded_inputs_match_onnx_runtime() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    chosen = InputRange(np.float32(0.0123), np.uint8(100))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [50, 16]) for name in ("x", "y")]
    constants = [
        numpy_helper.from_array(np.array(chosen.scale), "scale"),
        numpy_helper.from_array(np.array(chosen.zero_point), "zero"),
    ]
    graph = helper.make_graph(nodes, "rounding", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": rows})
    assert np.array_equal(round_inputs(rows, chosen), expected)


def test_weight_is_rounded_for_the_inputs_that_it_gets() -> None:
    """If inputs are correlated, the error of one row of a weight is compensated in others."""
    generator = np.random.default_rng(0)
    rows = (generator.normal(size=(800, 8)) @ generator.normal(size=(8, 64))).astype(np.float32)
    rows += 0.1 * generator.normal(size=rows.shape).astype(np.float32)
    weight = generator.normal(size=(64, 40)).astype(np.float32)
    (together,) = round_weights([weight], rows.T @ rows / np.float32(800))
    (each,) = round_weights([weight], np.eye(64, dtype=np.float32))
    errors = [np.square(rows @ (found.values * found.scales - weight)).mean() for found in (together, each)]
    assert np.abs(together.values).max() <= 127
    assert errors[0] < 0.3 * errors[1]


def test_unused_weight_is_rounded() -> None:
    weight = np.array([[0.5, 0.0], [1.0, 0.0]], np.float32)
    (found,) = round_weights([weight], np.zeros((2, 2), np.float32))
    assert np.allclose(found.values * found.scales, weight, atol=0.01)
