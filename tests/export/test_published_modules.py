"""Encoders of transformers without a family of ours: traced from the publisher's own module."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, Gemma3Config, Gemma3Model

from attnlens.bundle import read_manifest
from attnlens_export import ExportOptions, SourceError, check_bundle, export_bundle
from attnlens_export.contributions.one_token import limit_to_one_token
from attnlens_export.errors import DifferenceError, GraphError
from attnlens_export.graph.parameters import rebuild_encoder
from attnlens_export.graph.trace import embeddings_graph, trace
from attnlens_export.judge import question
from attnlens_export.parity.grid import Case, Padding, make_inputs, small_grid
from attnlens_export.parity.reference import run_float64, run_fp32
from attnlens_model import CheckpointError, ConfigError, load_checkpoint, published_module, read_config
from attnlens_model.attention.own_module import OwnModuleAttentionConfig
from attnlens_model.published_encoder import wrap_published
from attnlens_model.published_module import PublishedModule, Reach
from family_cases import EXPORTED as FAMILY_MODELS
from odd_models import OddModel, padded_masks
from published_layouts import add_modules, edit, save
from runtimes.measured import extended_except, found, measure
from small_bundles import TOKENIZERS
from small_files import write

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
CHUNKS = {"attention_chunk_size": 8, "num_attention_heads": 6, "intermediate_size_mlp": 96}

# Alternating causal windows, shared keys and values, capped scores, embeddings times sqrt(D), weights + 1.
GEMMA2 = OddModel(
    "Gemma2",
    {"num_key_value_heads": 1, "num_attention_heads": 4, "head_dim": 20, "query_pre_attn_scalar": 20}
    | {"sliding_window": 9, "num_hidden_layers": 2, "pad_token_id": 0, "attn_logit_softcapping": 5.0},
    std=0.08,
)
# Token types, and positions counted over token ids.
LUKE = OddModel("Luke", {"entity_vocab_size": 20, "entity_emb_size": 16, "pad_token_id": 1})
# Masks of its own, and embeddings that it changes in place.
XLM = OddModel("XLM", {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 2}, std=0.08)
# Before 5.21, transformers ran Gemma 2 by default with sdpa attention, which omits the cap of scores.
OMITS_CAP = transformers.Gemma2PreTrainedModel._supports_sdpa
MODELS = {"gemma2": GEMMA2, "luke": LUKE, "xlm": XLM}
HEADS = {"gemma2": [(4, 1, 20, 8), (4, 1, 20, 0)], "luke": [(3, 3, 32, 0)] * 3, "xlm": [(4, 4, 24, 0)] * 2}


def is_compared(model_type: str) -> bool:
    """Return whether a bundle equals its publisher's pipeline."""
    return model_type != "gemma2" or not OMITS_CAP


class Exported:
    """A bundle, and the model that it was made from."""

    def __init__(self, model_type: str, directory: Path) -> None:
        self.source, self.bundle = directory / "source", directory / "bundle"
        width = save(MODELS[model_type], self.source, "byte-level")
        add_modules(self.source, width, "mean")
        options = ExportOptions(grid=small_grid(40), comparison=is_compared(model_type))
        self.summary = export_bundle(self.source, self.bundle, options)
        self.config = read_config(self.bundle / "config.json")
        self.model: Any = AutoModel.from_pretrained(self.source, attn_implementation="eager")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    return functools.cache(lambda name: Exported(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=MODELS)
def exported(request: pytest.FixtureRequest, export: Callable[[str], Exported]) -> Exported:
    return export(request.param)


def test_manifest_describes_the_module(exported: Exported) -> None:
    manifest = read_manifest(exported.bundle)
    architecture = manifest.architecture
    assert architecture.family == exported.model.config.model_type
    found = [
        (layer.num_heads, layer.num_key_value_heads, layer.head_size, layer.window_radius)
        for layer in architecture.layers
    ]
    assert found == HEADS[architecture.family]
    assert architecture.is_causal == (architecture.family == "gemma2")
    assert architecture.type_vocab_size == (2 if architecture.family == "luke" else 0)
    results = [figure.result for figure in manifest.publisher.figures]
    assert ("hidden states" in results) == is_compared(architecture.family)
    assert [graph.id for graph in manifest.graphs] == ["embeddings", "attention", "contributions"]
    assert exported.summary.warnings == ()


def test_graphs_equal_transformers(exported: Exported) -> None:
    session = onnxruntime.InferenceSession(exported.bundle / "onnx" / "model_attentions.onnx")
    named = [value.name for value in session.get_inputs()]
    for mask in padded_masks(4, 33):
        ids = torch.randint(300, mask.shape, generator=torch.Generator().manual_seed(3))
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}
        feed = {name: feed[name] for name in named}
        with torch.no_grad():
            output = exported.model(**feed, output_attentions=True)
        hidden, *maps = session.run(None, {name: each.numpy() for name, each in feed.items()})
        live = mask.numpy() == 1
        assert np.abs(hidden - output.last_hidden_state.numpy())[live].max() < 1e-5
        for weights, expected in zip(maps, output.attentions, strict=True):
            rows = np.abs(weights - expected.numpy()).transpose(0, 2, 1, 3)
            assert rows[live].max() < 1e-5
            assert not weights.transpose(0, 2, 1, 3)[~live].any()


def test_classifier_with_the_common_head_of_decoders(tmp_path: Path) -> None:
    labels = dict(enumerate(["art", "law", "sea"]))
    model = OddModel("Gemma2", GEMMA2.changes | {"id2label": labels, "num_hidden_layers": 1}, std=0.08)
    save(model, tmp_path / "source", "byte-level", "ForSequenceClassification")
    options = ExportOptions(grid=small_grid(33), comparison=True)
    if OMITS_CAP:
        with pytest.raises(DifferenceError, match="difference of hidden states"):
            export_bundle(tmp_path / "source", tmp_path / "bundle", options)
        return
    manifest = export_bundle(tmp_path / "source", tmp_path / "bundle", options).manifest
    assert list(manifest.classifier.labels) == ["art", "law", "sea"]
    results = [figure.result for figure in manifest.publisher.figures]
    assert {"logits", "scores", "labels"} <= set(results)
    assert "contributions" in [graph.id for graph in manifest.graphs]


def test_classifier_whose_head_follows_from_its_tensors_must_be_compared(tmp_path: Path) -> None:
    labels = dict(enumerate(["art", "law", "sea"]))
    model = OddModel("XLM", XLM.changes | {"id2label": labels, "num_hidden_layers": 1}, std=0.08)
    save(model, tmp_path / "source", "byte-level", "ForSequenceClassification")
    options = ExportOptions(grid=small_grid(33), comparison=True, faithfulness=False)
    manifest = export_bundle(tmp_path / "source", tmp_path / "bundle", options).manifest
    assert list(manifest.classifier.labels) == ["art", "law", "sea"]
    assert {"logits", "scores", "labels"} <= {figure.result for figure in manifest.publisher.figures}
    options = replace(options, comparison=False)
    with pytest.raises(SourceError, match="must be compared with those of transformers"):
        export_bundle(tmp_path / "source", tmp_path / "other", options)


def test_text_encoder_of_a_multimodal_checkpoint_is_exported(tmp_path: Path) -> None:
    source, bundle = tmp_path / "source", tmp_path / "bundle"
    text: dict[str, Any] = {"vocab_size": 300, "hidden_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 20, "sliding_window": 9}
    text |= {"intermediate_size": 160, "max_position_embeddings": 64}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    model: Any = Gemma3Model(config)
    model.save_pretrained(source)
    shutil.copytree(TOKENIZERS / "byte-level", source, dirs_exist_ok=True)
    options = ExportOptions(pooling="mean", grid=small_grid(33), comparison=True)
    summary = export_bundle(source, bundle, options)
    assert {name.partition(".")[0] for name in summary.unused_tensors} == {
        "vision_tower",
        "multi_modal_projector",
    }
    content = json.loads((bundle / "config.json").read_text("utf-8"))
    assert (content["model_type"], content["hidden_size"]) == ("gemma3_text", 96)
    assert [layer.window_radius for layer in summary.manifest.architecture.layers] == [8, 0]
    assert "hidden states" in [figure.result for figure in summary.manifest.publisher.figures]
    assert check_bundle(bundle, grid=[Case(2, 33, Padding.RIGHT)]).verdict.passed


def test_sizes_of_heads_may_differ_between_layers() -> None:
    sizes = {"num_attention_heads": 4, "head_dim": 8, "global_head_dim": 12, "embedding_dim": 72}
    sizes |= {"hidden_size_per_layer_input": 20, "sliding_window": 8, "num_hidden_layers": 2}
    model = OddModel("EmbeddingGemma2Text", sizes | {"pad_token_id": 0}, std=0.05).make()
    config = wrap_published(model, "embedding_gemma2_text").config
    layers = [
        (layer.num_key_value_heads, layer.head_size, layer.window)
        for layer in config.layer_attentions
        if isinstance(layer, OwnModuleAttentionConfig)
    ]
    assert layers == [(2, 8, 8), (1, 12, None)]
    assert (config.hidden_size, config.vector_size) == (96, 72)


def test_checkpoint_with_custom_code_is_exported_from_the_module_of_transformers(tmp_path: Path) -> None:
    code = {"AutoModel": "modeling_own.OwnModel", "AutoConfig": "configuration_own.OwnConfig"}
    GEMMA2.make().save_pretrained(tmp_path)
    edit(tmp_path / "config.json", auto_map=code)
    with pytest.raises(ConfigError, match=r"refers to custom code.* add is_causal or use_bidirectional"):
        load_checkpoint(tmp_path)
    edit(tmp_path / "config.json", is_causal=True)
    checkpoint = load_checkpoint(tmp_path)
    assert (checkpoint.config.family, checkpoint.has_own_code) == ("gemma2", True)


# Norms by powers; parts of one projection; pairs of components; rotated queries that share keys.
@pytest.mark.parametrize("name", ["albert", "modernbert", "roformer", "qwen3"])
def test_last_layer_of_a_classifier_computes_one_token(name: str) -> None:
    model = FAMILY_MODELS[name].make()
    encoder = wrap_published(model, name)
    whole = embeddings_graph(trace(encoder, encoder.config))
    single = limit_to_one_token(whole, "weights")
    assert single is not None
    mask = np.array([[1] * 9, [1] * 6 + [0] * 3])
    last = np.eye(9, dtype=np.float32)[[8, 5]]
    ids = np.random.default_rng(0).integers(3, 290, mask.shape)
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids, "weights": last}
    results = []
    for graph in (whole, single):
        session = onnxruntime.InferenceSession(graph.proto_with_weights().SerializeToString())
        names = [value.name for value in session.get_inputs()]
        results.append(session.run(None, {name: feed[name] for name in names})[0])
    np.testing.assert_allclose(results[1][:, 0], results[0][[0, 1], [8, 5]], atol=1e-5)


def test_bundle_is_checked_with_and_without_its_checkpoint(exported: Exported) -> None:
    grid = [Case(2, 33, Padding.RIGHT)]
    assert check_bundle(exported.bundle, grid=grid).verdict.passed
    assert check_bundle(exported.bundle, exported.source, grid=grid).verdict.passed


def test_check_finds_a_changed_weight_of_the_checkpoint(
    export: Callable[[str], Exported], tmp_path: Path
) -> None:
    exported = export("luke")
    shutil.copytree(exported.source, tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["encoder.layer.1.attention.self.value.weight"][3, 5] += 0.5
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(GraphError, match=r"encoder\.layer\.1\.attention\.self\.value\.weight\[3, 5\] is"):
        check_bundle(exported.bundle, tmp_path / "source", grid=[Case(1, 3, Padding.NONE)])


def test_float64_reference_computes_nothing_in_fp32(export: Callable[[str], Exported]) -> None:
    """transformers casts norms, the softmax and rotations to fp32, also in a model in float64."""
    exported = export("gemma2")
    encoder = rebuild_encoder(exported.bundle / "onnx" / "model.onnx", exported.config)
    inputs = make_inputs(Case(2, 21, Padding.RIGHT), exported.config)
    computed: set[tuple[str, torch.dtype]] = set()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in (result,) if isinstance(result, torch.Tensor) else ():
                computed.add((func.__name__, tensor.dtype))
            return result

    with Watch():  # type: ignore[no-untyped-call]
        exact = run_float64(encoder, inputs, lambda _name, _tensor: None)
    of_rows = {"embedding.default", "detach.default", "_to_copy.default"}
    assert {name for name, dtype in computed if dtype == torch.float32} <= of_rows
    assert {name for name, dtype in computed if dtype == torch.float64} >= {
        "softmax.int",
        "rsqrt.default",
        "cos.default",
    }
    live = inputs.attention_mask == 1
    error = np.abs(exact - run_fp32(encoder, inputs, with_attentions=False)["last_hidden_state"])[live].max()
    assert 0 < error < 1e-4


@pytest.mark.parametrize("name", extended_except(["opencv", "openvino", "tract"], "openvino"))
def test_graphs_run_in_other_runtimes(export: Callable[[str], Exported], name: str) -> None:
    cases = [Case(1, 1, Padding.NONE), Case(2, 33, Padding.RIGHT)]
    result = measure(export("gemma2").bundle, found(name), cases)
    assert result.failures() == []


LAYERS = {"num_hidden_layers": 1, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("odd", "problem"),
    [
        (
            OddModel("Phi3", LAYERS | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
            r"its rotary embeddings \(longrope\) depend on the longest text of a batch",
        ),
        (
            OddModel("MobileBert", LAYERS | {"num_attention_heads": 4}),
            r"differ by \S+ between a text of 1 tokens in a batch and alone",
        ),
        (OddModel("Llama4Text", LAYERS | CHUNKS), "mask depends on more than the distance of query and key"),
        (OddModel("FNet", LAYERS), "it returns no attention weights"),
        (OddModel("Bart", {"d_model": 96, "encoder_layers": 1, "decoder_layers": 1}), "an encoder-decoder"),
        (OddModel("ViT", LAYERS), "it takes no token ids"),
    ],
    ids=lambda value: value.name if isinstance(value, OddModel) else "",
)
def test_module_that_cannot_be_traced_is_rejected_by_name(odd: OddModel, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        wrap_published(odd.make(), odd.name)


def test_wrapper_that_drops_a_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity would pass: it compares the graph with the wrapper."""
    model = GEMMA2.make()
    wrap_published(model, "gemma2")
    monkeypatch.setattr(published_module, "_find_reach", lambda _options, _max_tokens: Reach(None, 0))
    module = PublishedModule(model, 40)
    module.reaches = [Reach(None, 0), Reach(8, 0)]
    module.verify(300)
    module.reaches = [Reach(None, 0), Reach(9, 0)]
    with pytest.raises(ConfigError, match="of 9 tokens in a batch and alone, or with a portable"):
        module.verify(300)


def without_padding_on_the_left(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with 1 before the last token."""
    return mask.flip(1).cummax(1).values.flip(1)


def without_padding_on_the_right(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with 1 after the first token."""
    return mask.cummax(1).values


@pytest.mark.parametrize("drop", [without_padding_on_the_left, without_padding_on_the_right])
def test_wrapper_that_drops_padding_is_noticed(
    drop: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = PublishedModule(LUKE.make(), 40)
    keep = PublishedModule._keep
    monkeypatch.setattr(PublishedModule, "_keep", lambda self, reach, mask: keep(self, reach, drop(mask)))
    with pytest.raises(ConfigError, match="of 1 tokens in a batch and alone, or with a portable"):
        module.verify(300)


def test_checkpoint_without_a_tensor_of_the_encoder_is_rejected(
    export: Callable[[str], Exported], tmp_path: Path
) -> None:
    shutil.copytree(export("gemma2").source, tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["layers.1.self_attn.q_proj.weight"]
    safetensors.torch.save_file(tensors | {"lm_head.bias": torch.zeros(3)}, path, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lacks tensors of the encoder: layers\.1\.self_attn\.q_proj\.weight"
    ):
        load_checkpoint(tmp_path / "source")


@pytest.mark.parametrize(
    ("changes", "seconds", "message"),
    [
        (
            {"vocab_size": 10**9},
            60,
            r"describes an encoder of 384\.\d GB in fp32, but the checkpoint stores 0\.\d GB",
        ),
        (
            {"num_hidden_layers": 10**8},
            2,
            "transformers can't create the encoder that config.json describes: it ",
        ),
    ],
)
def test_sizes_beyond_those_of_the_weights_are_rejected_before_loading(
    changes: dict[str, Any],
    seconds: int,
    message: str,
    export: Callable[[str], Exported],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(question, "_MAX_DESCRIBING_S", seconds)
    shutil.copytree(export("luke").source, tmp_path / "source")
    edit(tmp_path / "source" / "config.json", **changes)
    with pytest.raises(SourceError, match=message):
        export_bundle(tmp_path / "source", tmp_path / "bundle", ExportOptions(pooling="mean"))


def test_unused_tensors_are_named(
    export: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    shutil.copytree(export("gemma2").source, tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = safetensors.torch.load_file(path) | {"lm_head.bias": torch.zeros(3)}
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    assert load_checkpoint(tmp_path / "source").unused_tensors == ("lm_head.bias",)
    assert "HF_HUB_OFFLINE" not in os.environ  # it would disable later downloads


def test_unknown_type_is_not_confused_with_one_of_transformers(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_own.OwnConfig"}
    write(tmp_path / "config.json", {"model_type": "bret", "hidden_size": 8, "auto_map": code})
    with pytest.raises(
        ConfigError, match=r"model_type='bret' is not known \(did you mean 'bert'\?\)"
    ) as caught:
        export_bundle(tmp_path, tmp_path / "bundle", ExportOptions(pooling="mean"))
    assert caught.value.__notes__ == [
        "custom code, to which auto_map in config.json refers, is not executed",
    ]
    write(tmp_path / "config.json", {"model_type": "gemma2", "num_hidden_layers": "many"})
    with pytest.raises(ConfigError, match=r"model_type='gemma2' can't be exported .*: Strict"):
        load_checkpoint(tmp_path)
