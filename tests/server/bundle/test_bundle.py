"""`open_bundle` rejects invalid bundles before it loads anything."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from attnlens_server.bundle import open_bundle
from attnlens_server.config import ServerConfig
from attnlens_server.errors import StartupError
from attnlens_server.served_model import ServedModel
from tampered import (
    ATTENTIONS,
    EMBEDDINGS,
    Json,
    change_graph,
    copy_of,
    manifest_of,
    put_hashes_right,
)


@pytest.fixture
def bundle(small_bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    return copy_of(small_bundle("wordpiece"), tmp_path)


def open_error(bundle: Path, **options: Any) -> str:
    with pytest.raises(StartupError) as caught:
        open_bundle(bundle, **options)
    return str(caught.value)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EMBEDDINGS, ATTENTIONS, "tokenizer.json"])
def test_modified_file_is_rejected_by_name(bundle: Path, name: str) -> None:
    path = bundle / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path} was altered: its SHA-256 is" in open_error(bundle)
    path.write_bytes(content[:-1])
    assert f"{path} was altered: its size is {len(content) - 1} bytes" in open_error(bundle)


def test_missing_file_is_rejected_by_name(bundle: Path) -> None:
    (bundle / "config.json").unlink()
    assert "config.json is missing" in open_error(bundle)


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "onnx/../../secret"])
def test_manifest_with_a_path_outside_the_bundle_is_rejected(bundle: Path, path: str) -> None:
    with manifest_of(bundle) as manifest:
        manifest["files"].append({"path": path, "size_bytes": "1", "sha256": "0"})
    assert f"names a file outside the bundle: {path}" in open_error(bundle)


def test_file_listed_twice_is_rejected_before_it_is_read(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["files"] += [file for file in manifest["files"] if file["path"] == EMBEDDINGS] * 99
        manifest["files"][0]["sha256"] = "0"
    assert f"lists {EMBEDDINGS} 100 times" in open_error(bundle)


@pytest.mark.parametrize(("name", "limit"), [("model_name", 256), ("source", 4096)])
def test_strings_included_in_every_response_are_limited(bundle: Path, name: str, limit: int) -> None:
    with manifest_of(bundle) as manifest:
        manifest[name] = "n" * limit
    assert open_bundle(bundle).manifest
    with manifest_of(bundle) as manifest:
        manifest[name] = "n" * (1 << 20)
    assert f"{name} has {1 << 20} bytes, but the limit is {limit}" in open_error(bundle)


@pytest.mark.parametrize(
    ("key", "value"), [("length", str(1 << 40)), ("offset", str(1 << 40)), ("length", "-1")]
)
def test_weights_beyond_the_end_of_their_file_are_rejected(bundle: Path, key: str, value: str) -> None:
    model = onnx.load(bundle / ATTENTIONS, load_external_data=False)
    tensor = next(each for each in model.graph.initializer if each.external_data)
    entry = next(each for each in tensor.external_data if each.key == key)
    entry.value = value
    (bundle / ATTENTIONS).write_bytes(model.SerializeToString())
    put_hashes_right(bundle)
    message = open_error(bundle)
    assert ATTENTIONS in message
    assert "negative" in message if value == "-1" else "has weights up to byte 1099" in message


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (
            "a" * 10_000_000,
            "has 10000000 bytes, but the limit of a text with its prompt is 131072: start the server",
        ),
        ("the " * 1000, r"has \d+ tokens, but the limit is \d+: export the bundle again"),
    ],
)
def test_default_prompt_that_fills_the_token_limit_is_rejected(bundle: Path, prompt: str, why: str) -> None:
    with manifest_of(bundle) as manifest:
        manifest["prompts"] = {"long": prompt}
    ServedModel(ServerConfig(bundle=bundle))
    with manifest_of(bundle) as manifest:
        manifest["default_prompt_name"] = "long"
    with pytest.raises(StartupError, match=f"the default prompt {why}"):
        ServedModel(ServerConfig(bundle=bundle))


def test_tokenizer_with_a_different_vocabulary_is_rejected(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["architecture"]["vocab_size"] = 7
        manifest["architecture"]["pad_token_id"] = 0
    with pytest.raises(
        StartupError, match=r"tokenizer\.json has the id \d+, but the model only supports ids below 7"
    ):
        ServedModel(ServerConfig(bundle=bundle))


def test_graph_without_a_hash_is_rejected(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["files"] = [file for file in manifest["files"] if file["path"] != ATTENTIONS]
    assert f"has no hash for its graph {ATTENTIONS}" in open_error(bundle)


def test_tokenizer_without_a_hash_is_rejected(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["files"] = [file for file in manifest["files"] if file["path"] != "tokenizer.json"]
    assert f"{bundle / 'tokenizer.json'} is not in the manifest" in open_error(bundle)
    (bundle / "tokenizer.json").unlink()
    assert open_bundle(bundle).tokenizer_path is None


def test_weights_in_a_file_without_a_hash_are_rejected(bundle: Path) -> None:
    def move_weights(graph: onnx.GraphProto) -> None:
        tensor = next(tensor for tensor in graph.initializer if tensor.external_data)
        [location] = [entry for entry in tensor.external_data if entry.key == "location"]
        location.value = "weights.bin"

    change_graph(bundle, ATTENTIONS, move_weights)
    (bundle / "onnx" / "weights.bin").write_bytes((bundle / EMBEDDINGS).read_bytes())
    assert f"{bundle / ATTENTIONS} has weights in 'onnx/weights.bin'" in open_error(bundle)
    with manifest_of(bundle) as manifest:
        manifest["files"].append({"path": "onnx/weights.bin", "size_bytes": "0", "sha256": ""})
    put_hashes_right(bundle)
    open_bundle(bundle)


def test_invalid_graph_file_is_rejected(bundle: Path) -> None:
    (bundle / EMBEDDINGS).write_bytes(b"not a graph")
    put_hashes_right(bundle)
    assert f"{bundle / EMBEDDINGS} is not valid ONNX" in open_error(bundle)


# --- the manifest ---------------------------------------------------------------------------------


def test_directory_without_a_bundle_is_rejected(tmp_path: Path) -> None:
    assert f"{tmp_path} is not a bundle" in open_error(tmp_path)
    assert "export" not in open_error(tmp_path)


def test_checkpoint_is_rejected_with_the_export_command(tmp_path: Path, bundle: Path) -> None:
    checkpoint = tmp_path / "my model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    error = open_error(checkpoint)
    assert "is not a bundle: manifest.json cannot be read" in error
    assert f"export it first with `attnlens export '{checkpoint}' --output DIR`" in error
    (bundle / "config.json").write_text("{}")
    (bundle / "manifest.json").write_text("{")
    assert "attnlens export" not in open_error(bundle)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_manifest_that_is_not_a_regular_file_is_rejected_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert "manifest.json is not a regular file" in open_error(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not a manifest"), ('{"a":' * 100_000, "is not a manifest"), ("\xff", "is not UTF-8")],
    ids=["cut", "deep", "latin"],
)
def test_invalid_manifest_is_rejected(bundle: Path, text: str, message: str) -> None:
    (bundle / "manifest.json").write_bytes(text.encode("latin-1"))
    assert message in open_error(bundle)


def test_oversized_manifest_is_rejected_unread(bundle: Path) -> None:
    with (bundle / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse: takes no disk space, but would take 1 TB of memory
    assert "it is larger than 16777216 bytes" in open_error(bundle)


@pytest.mark.parametrize("version", [1, 3])
def test_unsupported_format_is_rejected(bundle: Path, version: int) -> None:
    with manifest_of(bundle) as manifest:
        manifest["format_version"] = version
    assert f"has format version {version}, but this version of attnlens only reads 2" in open_error(bundle)


def test_unknown_required_feature_is_rejected_by_name(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["required_features"] = ["heads.scores", "another"]
    assert "requires another, heads.scores, which this version of attnlens does not support" in open_error(
        bundle
    )


def test_failed_parity_check_is_rejected(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["parity"]["passed"] = False
    assert re.search(r"parity failed.*report\.md", open_error(bundle))


def test_unavailable_precision_is_rejected(bundle: Path) -> None:
    assert "has no graph in int8: export it again with --precision int8" in open_error(
        bundle, precision="int8"
    )


def change_architecture(**sizes: int) -> Callable[[Json], object]:
    return lambda manifest: manifest["architecture"].update(sizes)


def change_output(graph: int, output: int, **fields: Any) -> Callable[[Json], object]:
    return lambda manifest: manifest["graphs"][graph]["outputs"][output].update(fields)


def add_graph_again(manifest: Json) -> None:
    manifest["graphs"].append(manifest["graphs"][0])


def drop_attentions(manifest: Json) -> None:
    del manifest["graphs"][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_architecture(num_layers=10**9),
            r"num_layers is 1000000000, which is outside the range 1 to 4096",
        ),
        (change_architecture(num_heads=0), r"num_heads is 0, which is outside the range 1"),
        (change_architecture(num_heads=2), r"attentions.0 of .* of layer 0 with 3 heads, .* at most 2 heads"),
        (change_architecture(hidden_size=0), r"hidden_size is 0"),
        (
            change_architecture(hidden_size=64),
            r"last_hidden_state of .*'96'.* no layer .* a hidden size of 64 and fp32",
        ),
        (change_architecture(vocab_size=0), r"vocab_size is 0"),
        (change_architecture(pad_token_id=300), r"pad_token_id is 300, which is outside the range 0 to 299"),
        (change_architecture(max_position_embeddings=-1), r"max_position_embeddings is -1"),
        (
            lambda manifest: manifest.update(max_tokens=35),
            r"max_tokens is 35, which is outside the range 1 to 34",
        ),
        (
            lambda manifest: manifest["pooling"].update(truncate_dim=97),
            r"truncate_dim is 97, which is outside the range 0 to 96",
        ),
        (lambda manifest: manifest["pooling"].update(truncate_dim=-1), r"truncate_dim is -1"),
        (lambda manifest: manifest["pooling"].update(pooling=99), "the pooling is missing or unknown"),
        (
            lambda manifest: manifest["pooling"].update(pooling="OF_TOMORROW"),
            "the pooling is missing or unknown",
        ),
        (
            lambda manifest: manifest.update(default_prompt_name="query"),
            "default prompt 'query' does not exist",
        ),
        (
            add_graph_again,
            r"GRAPH_PURPOSE_EMBEDDINGS graph in PRECISION_FP32, but has several: onnx/model.onnx, onnx/model",
        ),
        (drop_attentions, "must have one GRAPH_PURPOSE_ATTENTION graph in PRECISION_FP32, but has none"),
        (
            lambda manifest: manifest["graphs"][0].update(purpose="OF_TOMORROW"),
            "must have one GRAPH_PURPOSE_EMBEDDINGS graph in PRECISION_FP32, but has none",
        ),
        (change_output(0, 0, role="OF_TOMORROW"), "onnx/model.onnx has no output with the token vectors"),
        (change_output(1, 1, role="OF_TOMORROW"), "has no known output of a layer"),
        (change_output(1, 1, layer=1), "of layer 1 with 3 heads, which does not fit 1 layers"),
        (change_output(1, 1, num_heads=0), "of layer 0 with 0 heads"),
        (
            lambda manifest: manifest["graphs"][1]["outputs"].append(manifest["graphs"][1]["outputs"][1]),
            "two outputs with the same name or meaning",
        ),
        (lambda manifest: manifest["graphs"][0]["inputs"].pop(0), "has the inputs attention_mask"),
        (
            lambda manifest: manifest["graphs"][0]["outputs"][0]["value"].update(data_type="DATA_TYPE_INT64"),
            "last_hidden_state of onnx/model.onnx is DATA_TYPE_INT64",
        ),
    ],
)
def test_inconsistent_manifest_is_rejected_when_opened(
    bundle: Path, change: Callable[[Json], object], message: str
) -> None:
    with manifest_of(bundle) as manifest:
        change(manifest)
    assert re.search(message, found := open_error(bundle)), found
    assert str(bundle / "manifest.json") in found


def test_additions_of_a_later_version_are_accepted(bundle: Path) -> None:
    with manifest_of(bundle) as manifest:
        manifest["of_tomorrow"] = json.loads('{"a": [1]}')
        [*_, weights] = manifest["graphs"][1]["outputs"]
        manifest["graphs"][1]["outputs"].append(
            {"value": {"name": "of_tomorrow"}, "role": "OF_TOMORROW", "layer": 0, "layout": weights["layout"]}
        )
        manifest["graphs"].append({"path": manifest["graphs"][0]["path"], "purpose": "OF_TOMORROW"})
    opened = open_bundle(bundle)
    assert [output.name for output in opened.model.graphs["attention"].outputs] == [
        "last_hidden_state",
        "attentions.0",
    ]
    assert opened.model.graphs["attention"].unknown_outputs == {"of_tomorrow"}


def test_version_is_the_hash_of_the_manifest(bundle: Path) -> None:
    before = open_bundle(bundle).model.version
    assert before == hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    with manifest_of(bundle) as manifest:
        manifest["source_revision"] = "1" * 40
    assert open_bundle(bundle).model.version != before
