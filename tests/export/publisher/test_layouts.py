"""Exports that are compared with the publisher's pipeline: one model per layout, then each disagreement."""

import functools
import json
import re
import shutil
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import safetensors.numpy

from attnlens.published import ON_REQUEST, describe_comparison
from attnlens.similarity import Similarity
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export import DifferenceError, ExportOptions, SourceError, bundle, export_bundle
from attnlens_export.graph.trace import TracedGraph, trace
from attnlens_export.int8.texts import make_batches
from attnlens_export.judge import question
from attnlens_export.judge.compare import Rounding
from attnlens_export.judge.question import Question, compare_with_publisher
from attnlens_export.judge.reader import BundleReader
from attnlens_export.judge.result import PublisherResult
from attnlens_export.parity.grid import small_grid
from attnlens_export.published.pooling import read_pooling
from attnlens_model import Checkpoint, load_checkpoint, read_config
from attnlens_publisher.process import call
from published_layouts import LAYOUTS, SPECIAL, edit, export_options, make
from small_files import read, write

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TOKENS = ["token ids", "token types"]
EMBEDDER = [
    "prompts",
    "default prompt",
    "similarity",
    "token ids",
    "hidden states",
    "embeddings",
    "similarities",
]
RESULTS = {
    "mean with prompts": [
        "prompts",
        "default prompt",
        "similarity",
        *(
            f"{kind}{prompt}"
            for kind in TOKENS
            for prompt in ("", " (prompt query)", " (prompt passage)", " (no prompt)")
        ),
        *(
            f"{kind}{prompt}"
            for kind in ("hidden states", "embeddings")
            for prompt in ("", " (prompt query)", " (prompt passage)", " (no prompt)")
        ),
        "similarities",
    ],
    "cls": EMBEDDER,
    "dense": [*EMBEDDER[:4], "token types", *EMBEDDER[4:]],
    "last token": EMBEDDER,
    "sparse attention": [*EMBEDDER[:4], "token types", *EMBEDDER[4:]],
    "cross-encoder": ["prompts", "default prompt", *TOKENS, "hidden states", "logits", "scores", "labels"],
    "classifier": [*TOKENS, "hidden states", "logits", "scores", "labels"],
    "plain encoder": ["token ids", "hidden states"],
    "T5 encoder": ["token ids", "hidden states"],
}


class Exported(NamedTuple):
    source: Path
    bundle: Path
    manifest: Manifest


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """A bundle of each layout, exported once."""

    @functools.cache
    def export(layout: str) -> Exported:
        directory = tmp_path_factory.mktemp("layout")
        source = make(layout, directory)
        options = ExportOptions(grid=small_grid(16), **export_options(layout))
        return Exported(
            source, directory / "bundle", export_bundle(source, directory / "bundle", options).manifest
        )

    return export


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_equal_those_of_the_publisher(layout: str, exported: Callable[[str], Exported]) -> None:
    found = exported(layout).manifest.publisher
    assert [figure.result for figure in found.figures] == RESULTS[layout]
    assert found.library == ("sentence-transformers" if "prompts" in RESULTS[layout] else "transformers")
    assert set(found.versions) == {"transformers", found.library}
    assert found.longest_tokens == 32
    assert all(figure.max_abs_error <= figure.limit for figure in found.figures)


# --- Each disagreement ----------------------------------------------------------------------------


def judged(source: Path, bundle: Path) -> PublisherResult:
    """Compare the files of a bundle with the pipeline of a checkpoint."""
    config = read_config(bundle / "config.json")
    kind = "scorer" if (bundle / "classifier").is_dir() else "embedder"
    return compare_with_publisher(
        Question(source, config, kind), BundleReader(bundle, config), Rounding(1e-6, 1e-6), lambda *_: None
    )


def drop_prompt(bundle: Path) -> None:
    edit(bundle / "config_sentence_transformers.json", prompts={"query": "question: "})


def change_default_prompt(bundle: Path) -> None:
    edit(bundle / "config_sentence_transformers.json", default_prompt_name="passage")


def drop_added_token(bundle: Path) -> None:
    content = read(bundle / "tokenizer.json")
    kept = [token for token in content["added_tokens"] if token["content"] != "[MASK]"]
    assert len(kept) == len(content["added_tokens"]) - 1
    write(bundle / "tokenizer.json", content | {"added_tokens": kept})


def lower_limit(bundle: Path) -> None:
    edit(bundle / "sentence_bert_config.json", max_seq_length=31)


def truncate_left(bundle: Path) -> None:
    content = read(bundle / "tokenizer.json")
    content["truncation"]["direction"] = "Left"
    write(bundle / "tokenizer.json", content)


def drop_lowercasing(bundle: Path) -> None:
    content = read(bundle / "tokenizer.json")
    content["normalizer"]["lowercase"] = False
    write(bundle / "tokenizer.json", content)


def swap_types(bundle: Path) -> None:
    content = read(bundle / "tokenizer.json")
    for step in content["post_processor"]["pair"]:
        next(iter(step.values()))["type_id"] = 0
    write(bundle / "tokenizer.json", content)


def pool_by_cls(bundle: Path) -> None:
    edit(bundle / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)


def normalize(bundle: Path) -> None:
    modules = read(bundle / "modules.json")
    module = {
        "idx": 2,
        "name": "2",
        "path": "2_Normalize",
        "type": modules[1]["type"].replace("Pooling", "Normalize"),
    }
    write(bundle / "modules.json", [*modules, module])


def permute_labels(bundle: Path) -> None:
    edit(bundle / "classifier" / "config.json", labels=["law", "art", "sea"])


def change_activation(bundle: Path) -> None:
    edit(bundle / "classifier" / "config.json", activation="identity")


def put_nan(bundle: Path) -> None:
    path = bundle / "onnx" / "model.onnx"
    graph = onnx.load(path)
    tensor = next(each for each in graph.graph.initializer if each.name.endswith("attention_norm.bias"))
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.nan, tensor.name))
    onnx.save(graph, path)


def keep_8_components(bundle: Path) -> None:
    edit(bundle / "config_sentence_transformers.json", truncate_dim=8)


def lose_second_text(bundle: Path) -> None:
    content = read(bundle / "tokenizer.json")
    content["post_processor"]["pair"] = content["post_processor"]["single"]
    write(bundle / "tokenizer.json", content)


@pytest.mark.parametrize(
    ("layout", "change", "expected", "ours", "theirs"),
    [
        ("mean with prompts", drop_prompt, "prompts", "'query': 'question: '}", "'passage': 'passage: '"),
        ("mean with prompts", change_default_prompt, "default prompt", "'passage'", "'query'"),
        ("mean with prompts", drop_added_token, "token ids", "of ", "of "),
        ("mean with prompts", lower_limit, "token ids", "of 31", "of 32"),
        ("mean with prompts", truncate_left, "token ids", "of 32", "of 32"),
        ("mean with prompts", drop_lowercasing, "token ids", "of ", "of "),
        ("mean with prompts", pool_by_cls, "embeddings", " at [", ""),
        ("mean with prompts", normalize, "embeddings", " at [", ""),
        ("dense", put_nan, "hidden states", "nan at [", ""),
        ("dense", keep_8_components, "embeddings", "the shape (8,)", "the shape (24,)"),
        ("cross-encoder", lose_second_text, "pairs", "'no pairs'", "'scores of pairs'"),
        ("cross-encoder", swap_types, "token types", "[0, ", "[1, "),
        ("cross-encoder", change_activation, "scores", " at [0]", ""),
        ("classifier", change_activation, "scores", " at [", ""),
        ("classifier", permute_labels, "labels", "('law', 'art', 'sea')", "('art', 'law', 'sea')"),
    ],
)
def test_bundle_with_another_setting_differs_in_the_first_step_that_uses_it(
    layout: str,
    change: Callable[[Path], None],
    expected: str,
    ours: str,
    theirs: str,
    exported: Callable[[str], Exported],
    tmp_path: Path,
) -> None:
    source, directory, _ = exported(layout)
    bundle = Path(shutil.copytree(directory, tmp_path / "bundle"))
    change(bundle)
    first = next(found for found in judged(source, bundle).comparisons if not found.passed)
    assert first.what == f"difference of {expected}"
    values = first.worst.partition("the bundle has ")[2].split(", but the publisher ")
    assert ours in values[0]
    assert theirs in values[1]
    assert first.failure.startswith(f"difference of {expected} on ")


def test_wrong_similarity_differs(
    exported: Callable[[str], Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, bundle, _ = exported("mean with prompts")
    of = Similarity.of
    monkeypatch.setattr(Similarity, "of", lambda self, first, second: of(self, first, second) + 1e-3)
    [wrong] = [found for found in judged(source, bundle).comparisons if not found.passed]
    assert wrong.what == "difference of similarities"


def change_weight(source: Path) -> None:
    path = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    name = next(name for name in tensors if name.endswith("attention.self.query.weight"))
    tensors[name][0] += np.float32(1)
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})


def change_similarity(source: Path) -> None:
    edit(source / "config_sentence_transformers.json", similarity_fn_name="dot")


def raise_limit(source: Path) -> None:
    edit(source / "sentence_bert_config.json", max_seq_length=33)


@pytest.mark.parametrize(
    ("change", "expected"),
    [(change_weight, "hidden states"), (change_similarity, "similarity"), (raise_limit, "token ids")],
)
def test_bundle_of_another_checkpoint_differs(
    change: Callable[[Path], None], expected: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    source, bundle, _ = exported("mean with prompts")
    changed = Path(shutil.copytree(source, tmp_path / "source"))
    change(changed)
    result = judged(changed, bundle)
    first = next(found.what for found in result.comparisons if not found.passed)
    assert first == f"difference of {expected}"


def give_type_1(directory: Path) -> None:
    """Let the tokenizer give type 1 to single texts, as that of XLNet does."""
    content = read(directory / "tokenizer.json")
    for step in content["post_processor"]["single"]:
        next(iter(step.values()))["type_id"] = 1
    write(directory / "tokenizer.json", content)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    edit(directory / "tokenizer_config.json", **settings, **SPECIAL)


def test_token_types_of_single_texts_are_those_of_the_publisher(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(exported("mean with prompts").source, tmp_path / "source"))
    give_type_1(source)
    options = ExportOptions(grid=small_grid(16), **export_options("mean with prompts"))
    manifest = export_bundle(source, tmp_path / "bundle", options).manifest
    assert "token types" in [figure.result for figure in manifest.publisher.figures]
    config = read_config(tmp_path / "bundle" / "config.json")
    [batch] = make_batches(["The engineers"], tmp_path / "bundle" / "tokenizer.json", config, 32)
    assert batch.inputs.token_type_ids is not None
    assert batch.inputs.token_type_ids.all()
    # The bundle of the checkpoint whose single texts have type 0.
    result = judged(source, exported("mean with prompts").bundle)
    first = next(found for found in result.comparisons if not found.passed)
    assert first.what == "difference of token types"
    assert re.search(r"the bundle has \[0, .*, but the publisher \[1, ", first.worst)


# --- The export -----------------------------------------------------------------------------------


def test_export_stops_and_leaves_the_target_if_a_result_differs(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, _ = exported("mean with prompts")

    def read_wrongly(*args: Any) -> Any:
        pooling = read_pooling(*args)
        pooling.normalize = not pooling.normalize
        return pooling

    monkeypatch.setattr(bundle, "read_pooling", read_wrongly)
    options = ExportOptions(grid=small_grid(16), **export_options("mean with prompts"))
    with pytest.raises(
        DifferenceError,
        match=r"the bundle differs from sentence-transformers .*: difference of embeddings",
    ):
        export_bundle(source, tmp_path / "bundles" / "wrong", options)
    assert not (tmp_path / "bundles").exists()


EMBEDDINGS = [f"embeddings{prompt}" for prompt in ("", " (prompt title)", " (no prompt)")]


@pytest.mark.parametrize(
    ("options", "not_compared", "embeddings"),
    [
        ({"pooling": "cls"}, "embeddings: chosen by --pooling, --normalize or --skip-module", []),
        (
            {"prompts": {"title": "title: "}, "default_prompt": "title"},
            "prompts: chosen by --prompt or --default-prompt",
            EMBEDDINGS,
        ),
        ({"comparison": False, "pooling": "max"}, ON_REQUEST, []),
    ],
)
def test_options_that_change_a_result_are_recorded(
    options: dict[str, Any],
    not_compared: str,
    embeddings: list[str],
    exported: Callable[[str], Exported],
    tmp_path: Path,
) -> None:
    chosen = ExportOptions(grid=small_grid(16), **export_options("dense", **options))
    found = export_bundle(exported("dense").source, tmp_path / "bundle", chosen).manifest.publisher
    assert found.not_compared[0] == not_compared
    assert [entry.result for entry in found.figures if entry.result.startswith("embed")] == embeddings
    assert not_compared in describe_comparison(found)


def test_longformer_has_the_global_tokens_of_its_pipeline_unless_others_are_chosen(
    exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    source, _, manifest = exported("sparse attention")
    assert list(manifest.publisher.not_compared) == ["global tokens: chosen by --global-tokens"]
    options = ExportOptions(grid=small_grid(16), faithfulness=False, comparison=True)
    with pytest.raises(
        DifferenceError, match=r"difference of hidden states .*: choose .* with --global-tokens"
    ):
        export_bundle(source, tmp_path / "bundle", options)


def test_export_of_an_own_configuration_has_no_publisher(
    quick: ExportOptions, tiny_config: Any, tmp_path: Path
) -> None:
    import dataclasses  # noqa: PLC0415

    options = dataclasses.replace(quick, comparison=True, faithfulness=False)
    found = export_bundle(tiny_config, tmp_path / "bundle", options).manifest.publisher
    assert describe_comparison(found) == "not compared: the encoder is not a published checkpoint"


def test_weights_are_freed_before_the_pipeline_is_loaded(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the export of a large model would need the memory of both models at once."""
    source = exported("dense").source
    loaded: list[Checkpoint] = []
    transposed: list[weakref.ref[Any]] = []
    held = []

    def load(*args: Any, **options: Any) -> Checkpoint:
        loaded.append(load_checkpoint(*args, **options))
        return loaded[-1]

    def trace_weakly(*args: Any) -> TracedGraph:
        traced = trace(*args)
        transposed.extend(map(weakref.ref, traced.weights.values()))
        return traced

    def ask(*args: Any, **arguments: Any) -> Any:
        numbers = sum(parameter.numel() for parameter in loaded[-1].encoder.parameters())
        held.append((numbers, sum(array() is not None for array in transposed)))
        return call(*args, **arguments)

    monkeypatch.setattr(bundle, "load_checkpoint", load)
    monkeypatch.setattr(question, "call", ask)
    monkeypatch.setattr(question, "_MAX_CONCURRENT_BYTES", 0)
    options = ExportOptions(grid=small_grid(16), **export_options("dense", tracer=trace_weakly))
    export_bundle(source, tmp_path / "bundle", options)
    assert len(transposed) > 10
    assert held[-1] == (0, 0)


def test_pipeline_of_a_small_model_runs_while_the_encoder_is_traced(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_started = threading.Event()

    def ask(*args: Any, **arguments: Any) -> Any:
        has_started.set()
        return call(*args, **arguments)

    def trace_later(*args: Any) -> TracedGraph:
        assert has_started.wait(60)
        return trace(*args)

    monkeypatch.setattr(question, "call", ask)
    options = ExportOptions(grid=small_grid(16), **export_options("dense", tracer=trace_later))
    manifest = export_bundle(exported("dense").source, tmp_path / "bundle", options).manifest
    assert manifest.publisher == exported("dense").manifest.publisher


@pytest.mark.parametrize(("comparison", "need"), [(True, "2.1"), (False, "1.6")])
def test_too_little_memory_stops_before_loading(
    comparison: bool,
    need: str,
    exported: Callable[[str], Exported],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, _, _ = exported("dense")
    monkeypatch.setattr(question, "memory_limit", lambda: 10**9)
    monkeypatch.setattr(bundle, "load_checkpoint", None)
    message = f"the export needs {need} GB of memory, but 1.0 GB are available: free memory"
    with pytest.raises(SourceError) as caught:
        export_bundle(source, tmp_path / "bundle", ExportOptions(comparison=comparison))
    assert str(caught.value).startswith(message)
    assert ("--without-comparison" in str(caught.value)) is comparison


def test_need_of_large_weights_includes_both_copies_of_the_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the contribution graph. The need of others is 1.3 times the weights, and 2 GiB."""
    monkeypatch.setattr(question, "memory_limit", lambda: 10**9)
    for num_bytes, need in ((2 * 10**8, "2.4"), (4 * 10**9, "9.6")):
        header = json.dumps({"a": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, 0]}})
        content = struct.pack("<Q", len(header)) + header.encode()
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(SourceError, match=f"needs {need} GB"):
            question.check_memory(tmp_path, has_comparison=True)
