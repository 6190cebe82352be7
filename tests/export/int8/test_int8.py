"""The graph in int8: what is in it, how close it comes, what is refused, and what `check` notices."""

import csv
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

from attnlens.bundle import BundleError, describe_file, read_manifest, write_manifest
from attnlens.v1.quantization_pb2 import Quantization, QuantizationMethod
from attnlens.v1.tensor_pb2 import DataType
from attnlens_cli.commands.check import check
from attnlens_cli.commands.export import export
from attnlens_export import AccuracyError, ExportOptions, SourceError, export_bundle
from attnlens_export.check import check_bundle
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import write_embedded
from attnlens_export.int8 import search
from attnlens_export.int8.agreement import (
    Agreement,
    Embedder,
    KindAgreement,
    alone_error,
    compare,
    run_all,
)
from attnlens_export.int8.calibration import Activations, collect
from attnlens_export.int8.convert import to_int8
from attnlens_export.int8.products import Group, find_groups
from attnlens_export.int8.recipes import MIN_EXACT_COLUMNS, Method, Recipe, make_recipe
from attnlens_export.int8.result import Gate, Int8Result
from attnlens_export.int8.rounding import InputRange, round_inputs, round_weight
from attnlens_export.int8.search import choose, divide, lost
from attnlens_export.int8.sessions import open_session
from attnlens_export.int8.texts import (
    KINDS,
    Batch,
    make_batches,
    read_kinds,
    read_written,
    split_texts,
    write_texts,
)
from attnlens_export.manifest import bundle_files
from attnlens_export.parity.grid import Inputs, small_grid
from attnlens_export.published.pooling import read_pooling
from attnlens_model import load_checkpoint
from odd_models import OddModel
from small_bundles import export_small

STSB = Path(__file__).parents[2] / "data" / "stsb-en-dev.csv"
LOOSE = Gate(min_mean_cosine=0.99, min_cosine=0.9)
FAMILIES = {
    # A product of the table of relative positions, which is no row for each token.
    "deberta_v2": OddModel(
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8}
        | {"max_relative_positions": 24, "num_hidden_layers": 1},
    ),
    # One weight for all layers.
    "albert": OddModel("Albert", {"embedding_size": 64, "num_hidden_layers": 2}),
    # The norm before the products is theirs alone.
    "eurobert": OddModel(
        "EuroBert",
        {"pad_token_id": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 2},
        std=0.1,
    ),
}


@dataclass(frozen=True)
class Written:
    """A graph, and what goes into its products."""

    graph: TracedGraph
    path: Path
    activations: dict[str, Activations]

    def recipe(self, group: Group, method: Method) -> Recipe:
        return make_recipe(group, method, self.graph, self.activations[group.source])

    def convert(self, recipes: list[Recipe]) -> tuple[onnxruntime.InferenceSession, onnx.ModelProto]:
        """Return the graph in int8, and what ONNX Runtime makes of it."""
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
    """MiniLM's graph, embedders of the texts to verify with, and of others that are real."""

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

    halves = {kind: split_texts(texts) for kind, texts in read_kinds(None).items()}
    calibration = embedders({kind: half[0] for kind, half in halves.items()})
    with STSB.open(encoding="utf-8", newline="") as file:
        sentences = [row[0] for row in itertools.islice(csv.reader(file), 0, 1500, 7)]
    words = sorted({word for sentence in sentences for word in re.findall(r"\w+", sentence)})[::5]
    others = embedders({"sentences": sentences, "words": words, "empty": [""]})
    graph = embeddings_graph(trace(checkpoint.encoder, checkpoint.config))
    directory = tmp_path_factory.mktemp("minilm_int8")
    written = write_graph(graph, [each.batches for each in calibration.values()], directory)
    return MiniLM(written, embedders({kind: half[1] for kind, half in halves.items()}), others)


def test_minilm_keeps_the_embeddings_of_every_kind_of_text(minilm: MiniLM) -> None:
    """All but what loses most, the values and what follows them, in int8."""
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
        for kind in found.kinds.values():
            assert kind.mean_cosine >= 0.999
            assert kind.min_cosine >= 0.99
        assert found.neighbour_agreement >= 0.9
    # They run on integers, and what a text is batched with makes no difference at all.
    assert integer_products(optimized) == 24
    assert alone_error(session, minilm.others["sentences"].batches[::4]) == 0


def test_what_makes_the_difference_for_minilm(minilm: MiniLM) -> None:
    few = {"sentences": minilm.kinds["sentences"]}
    expected = run_all(few, open_session(minilm.written.path))
    groups = {group.weights[0]: group for group in find_groups(minilm.written.graph)}

    def loss(weight: str, method: Method) -> float:
        session, _ = minilm.written.convert([minilm.written.recipe(groups[weight], method)])
        return 1 - compare(run_all(few, session), expected).mean_cosine

    query, down = "layers.5.attention.query.weight.T", "layers.0.feed_forward.down.weight.T"
    assert loss(query, Method.SMOOTHED) < 0.5 * loss(query, Method.PLAIN)
    assert loss(query, Method.EVENED) < loss(query, Method.SMOOTHED)
    assert loss(query, Method.EXACT_VALUES) < 0.5 * loss(query, Method.SMOOTHED)
    assert loss(down, Method.EXACT_COLUMNS) < 0.5 * loss(down, Method.SMOOTHED)


def test_a_short_text_counts_as_much_as_a_long_one(minilm: MiniLM) -> None:
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
def test_a_family_converts(family: str, tmp_path: Path) -> None:
    FAMILIES[family].make().save_pretrained(tmp_path / "source")
    checkpoint = load_checkpoint(tmp_path / "source")
    graph = embeddings_graph(trace(checkpoint.encoder, checkpoint.config))
    batches = random_batches(checkpoint.config.vocab_size, types=checkpoint.config.type_vocab_size > 1)
    written = write_graph(graph, [batches], tmp_path)
    groups = [group for group in find_groups(graph) if group.source in written.activations]
    methods = itertools.cycle([Method.SMOOTHED, Method.EXACT_COLUMNS, Method.PLAIN])
    recipes = [written.recipe(group, method) for group, method in zip(groups, methods, strict=False)]
    session, optimized = written.convert(recipes)
    assert integer_products(optimized) == sum(len(group.results) for group in groups)
    exact = open_session(written.path)
    for batch in random_batches(
        checkpoint.config.vocab_size, types=batches[0].inputs.token_type_ids is not None, seed=1
    ):
        ours, expected = (each.run(None, batch.inputs.feed())[0] for each in (session, exact))
        live = batch.inputs.attention_mask == 1
        norms = np.linalg.norm(ours, axis=-1) * np.linalg.norm(expected, axis=-1)
        cosines = ((ours * expected).sum(axis=-1) / norms)[live]
        # Random weights: a value beyond those of the calibration, which is cut off, is not rare.
        assert cosines.mean() > 0.995
        assert cosines.min() > 0.9
        assert np.abs(ours - expected)[live].max() > 1e-5  # it is not the fp32 graph
    assert alone_error(session, batches) <= 1e-5
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


def test_rounded_inputs_are_those_of_onnx_runtime() -> None:
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


def test_a_weight_is_rounded_for_the_inputs_that_it_gets() -> None:
    """Where inputs go together, what one row of a weight loses is made good in others."""
    generator = np.random.default_rng(0)
    rows = (generator.normal(size=(800, 8)) @ generator.normal(size=(8, 64))).astype(np.float32)
    rows += 0.1 * generator.normal(size=rows.shape).astype(np.float32)
    weight = generator.normal(size=(64, 40)).astype(np.float32)
    together = round_weight(weight, rows.T @ rows / np.float32(800))
    each = round_weight(weight, np.eye(64, dtype=np.float32))
    errors = [np.square(rows @ (found.values * found.scales - weight)).mean() for found in (together, each)]
    assert np.abs(together.values).max() <= 127
    assert errors[0] < 0.3 * errors[1]


def test_a_weight_that_no_input_reaches_is_rounded_all_the_same() -> None:
    weight = np.array([[0.5, 0.0], [1.0, 0.0]], np.float32)
    found = round_weight(weight, np.zeros((2, 2), np.float32))
    assert np.allclose(found.values * found.scales, weight, atol=0.01)


def test_the_plan_pays_least_time_for_the_loss_that_it_saves() -> None:
    losses = [
        {Method.FP32: 0.0, Method.PLAIN: 0.5, Method.SMOOTHED: 0.1},
        {Method.FP32: 0.0, Method.PLAIN: 0.3, Method.SMOOTHED: 0.25},
        {Method.FP32: 0.0, Method.PLAIN: 0.05, Method.SMOOTHED: 0.04},
    ]
    seconds = [{Method.FP32: 9.0, Method.PLAIN: 1.0, Method.SMOOTHED: 1.5}] * 3
    assert choose(losses, seconds, 1.0) == (Method.PLAIN,) * 3
    assert choose(losses, seconds, 0.5) == (Method.SMOOTHED, Method.PLAIN, Method.PLAIN)
    assert choose(losses, seconds, 0.2) == (Method.SMOOTHED, Method.FP32, Method.PLAIN)
    assert choose(losses, seconds, 0.0) == (Method.FP32,) * 3


def test_a_budget_below_a_plan_that_failed_gives_another() -> None:
    """Budgets a little apart often give the same plan, which must not be all that a search measures."""
    losses = [{Method.FP32: 0.0, Method.PLAIN: 0.2} for _ in range(3)]
    seconds = [{Method.FP32: 2.0, Method.PLAIN: 1.0} for _ in range(3)]
    plan = choose(losses, seconds, 0.55)
    assert choose(losses, seconds, 0.41) == plan
    assert choose(losses, seconds, 0.99 * lost(plan, losses)) != plan


def test_a_deep_model_is_divided_into_few_units() -> None:
    groups = [Group(f"{kind}{layer}", (), (), kind) for layer in range(24) for kind in "abcd"]
    units = divide(groups)
    assert len(units) == search.MAX_UNITS
    assert sorted(group.source for unit in units for group in unit) == sorted(
        group.source for group in groups
    )
    assert all(len({group.kind for group in unit}) == 1 for unit in units)


def test_the_gate_uses_the_worse_of_mean_and_smallest() -> None:
    gate = Gate(0.999, 0.995)
    assert gate.use(agreement(prose=(0.9995, 0.99))) == pytest.approx(2)
    assert gate.use(agreement(prose=(0.998, 0.998))) == pytest.approx(2)
    assert gate.use(agreement(prose=(np.nan, 0.998))) > 1e9


def test_the_gate_holds_for_every_kind_by_itself() -> None:
    found = agreement(prose=(0.9999, 0.9999), words=(0.9985, 0.998))
    assert Gate(0.999, 0.995).use(found) == pytest.approx(1.5)
    (failure,) = Int8Result(Gate(0.999, 0.995), found, 200, 900, 0.0).failures()
    assert "the mean cosine of 7 embeddings with those in fp32, words, is 0.998500" in failure


def test_a_search_keeps_a_part_of_the_gate_in_reserve() -> None:
    tightened = Gate(0.999, 0.995).tightened(0.9)
    assert tightened.min_mean_cosine == pytest.approx(0.9991)
    assert tightened.min_cosine == pytest.approx(0.9955)


def agreement(**kinds: tuple[float, float]) -> Agreement:
    """Return one of kinds of 7 texts with these means and smallest cosines, and whatever for the rest."""
    return Agreement({name: KindAgreement(7, *each) for name, each in kinds.items()}, 1, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small("wordpiece", tmp_path_factory.mktemp("int8"), precision="int8", gate=LOOSE)


@pytest.fixture
def copied(int8_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(int8_bundle, tmp_path / "copy"))


def quantization(directory: Path) -> Quantization:
    graph = read_manifest(directory).graphs[-1]
    assert (graph.path, graph.data_type) == ("onnx/model_int8.onnx", DataType.DATA_TYPE_INT8)
    return graph.quantization


def test_the_manifest_says_what_was_chosen_and_measured(int8_bundle: Path) -> None:
    made = quantization(int8_bundle)
    assert (made.min_mean_cosine, made.min_cosine) == (0.99, 0.9)
    assert 0.99 <= made.mean_cosine_found < 1
    assert 0.9 <= made.min_cosine_found <= made.mean_cosine_found
    assert 0.5 < made.min_token_cosine <= made.mean_token_cosine < 1
    assert 0.5 < made.neighbour_agreement <= 1
    assert made.alone_error <= 1e-5
    texts = (int8_bundle / "parity" / "int8_texts.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert made.num_texts == len(texts) == sum(kind.num_texts for kind in made.kinds)
    assert [kind.name for kind in made.kinds] == list(KINDS)
    for kind in made.kinds:
        assert 0.99 <= kind.mean_cosine_found < 1
        assert 0.9 <= kind.min_cosine_found <= kind.mean_cosine_found
    calibration = [text for kind in read_kinds(None).values() for text in kind[::2]]
    assert made.num_calibration_texts == len(calibration)
    # The empty text is the only one that every encoder will see.
    assert set(texts) & set(calibration) == {""}
    assert made.num_tokens > 5 * len(texts)
    assert len(made.products) == 6
    methods = {product.method for product in made.products}
    assert methods - {QuantizationMethod.QUANTIZATION_METHOD_FP32}
    assert QuantizationMethod.QUANTIZATION_METHOD_UNSPECIFIED not in methods
    for product in made.products:
        has_columns = product.method == QuantizationMethod.QUANTIZATION_METHOD_EXACT_COLUMNS
        assert product.num_exact_columns == (MIN_EXACT_COLUMNS if has_columns else 0)
    assert "## In int8" in (int8_bundle / "parity" / "report.md").read_text(encoding="utf-8")
    assert not [path for path in bundle_files(int8_bundle) if path.name.startswith(".")]


def test_check_measures_it_again(int8_bundle: Path) -> None:
    parity = check_bundle(int8_bundle, grid=small_grid(2)).parity
    assert parity.passed
    assert parity.int8 is not None
    assert parity.int8.agreement.mean_cosine == quantization(int8_bundle).mean_cosine_found
    result = CliRunner().invoke(check, [str(int8_bundle), "--parity-tokens", "2"])
    assert result.exit_code == 0, result.output
    assert "model_int8.onnx against model.onnx" in result.stdout
    assert re.search(r"gate, for each +0\.99 +0\.9\b", result.stdout)
    for kind in quantization(int8_bundle).kinds:
        figures = rf"{kind.mean_cosine_found:.6f} +{kind.min_cosine_found:.6f}"
        assert re.search(rf"{kind.name} +{kind.num_texts} +{figures}", result.stdout)


def test_check_takes_a_bundle_that_names_no_kinds(copied: Path) -> None:
    """One of attnlens 0.1.0."""
    manifest = read_manifest(copied)
    del manifest.graphs[-1].quantization.kinds[:]
    write_manifest(copied, manifest)
    parity = check_bundle(copied, grid=small_grid(2)).parity
    assert parity.passed
    assert parity.int8 is not None
    assert list(parity.int8.agreement.kinds) == ["texts"]


def test_check_refuses_other_texts_than_the_manifest_names(copied: Path) -> None:
    path = copied / "parity" / "int8_texts.txt"
    path.write_text(path.read_text(encoding="utf-8") + "one more\n", encoding="utf-8")
    sign(copied)
    with pytest.raises(BundleError, match=r"int8_texts\.txt has \d+ texts, the manifest names \d+"):
        check_bundle(copied, grid=small_grid(2))


def sign(directory: Path) -> None:
    """Make the manifest's hashes those of the files, as whoever alters a bundle on purpose would."""
    manifest = read_manifest(directory)
    del manifest.files[:]
    manifest.files.extend(describe_file(directory, path) for path in bundle_files(directory))
    write_manifest(directory, manifest)


def test_check_notices_another_weight(copied: Path) -> None:
    path = copied / "onnx" / "model_int8.onnx"
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_int8"):
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.roll(values, 1, axis=0), tensor.name))
    path.write_bytes(model.SerializeToString())
    sign(copied)
    parity = check_bundle(copied, grid=small_grid(2)).parity
    assert not parity.passed
    assert "onnx/model_int8.onnx: the mean cosine of" in parity.failures()[0]


def test_a_gate_that_nothing_meets_is_refused(tmp_path: Path) -> None:
    gate = Gate(min_mean_cosine=0.9999999, min_cosine=0.9999999)
    with pytest.raises(AccuracyError, match=r"no (graph|product).* in int8 .*lower --min-mean-cosine"):
        export_small("wordpiece", tmp_path, precision="int8", gate=gate)
    assert not (tmp_path / "bundle").exists()


def test_without_a_tokenizer_it_is_refused(tmp_path: Path) -> None:
    OddModel("Bert", {"num_hidden_layers": 1}).make().save_pretrained(tmp_path / "source")
    options = ExportOptions(grid=small_grid(2), precision="int8")
    with pytest.raises(SourceError, match="calibrated with texts, and there is no tokenizer"):
        export_bundle(tmp_path / "source", tmp_path / "bundle", options)


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("one text\n\nanother\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"texts\.txt has 2 texts, at least 20"):
        read_kinds(path)


def test_given_texts_are_a_kind_besides_the_others(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(f" text {number} " for number in range(20)), encoding="utf-8")
    kinds = read_kinds(path)
    assert list(kinds) == [*KINDS, "given"]
    assert kinds.pop("given") == [f"text {number}" for number in range(20)]
    assert kinds == read_kinds(None)


def test_no_text_of_this_package_is_in_both_halves_but_the_empty_one() -> None:
    for texts in read_kinds(None).values():
        calibration, verification = split_texts(texts)
        assert set(calibration) & set(verification) <= {""}
        assert min(len(calibration), len(verification)) >= 30


def test_written_texts_are_read_by_kind(tmp_path: Path) -> None:
    kinds = {"short": ["", "a"], "none": [], "long": ["a b c"]}
    write_texts(tmp_path / "texts.txt", kinds)
    assert read_written(tmp_path / "texts.txt", {kind: len(each) for kind, each in kinds.items()}) == kinds


@pytest.mark.parametrize(
    "option", [("--min-cosine", "0.9"), ("--min-mean-cosine", "0.9"), ("--calibration", STSB)]
)
def test_its_options_need_it(option: tuple[str, object], tmp_path: Path) -> None:
    arguments = ["model", "--output", str(tmp_path / "bundle"), *map(str, option)]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 2
    assert "need --precision int8" in result.output
