"""Error messages for published models that are not supported.

The tables contain `model_type` values of a Hugging Face `config.json`.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnlens_model.errors import CheckpointError, suggestion

# Minimum difflib ratio of related names: 0.6 for "newest" and "neobert", but 0.8 for "qwen4" and "qwen3".
_MIN_RATIO = 0.7
# Model types whose names do not describe an architecture.
_GENERIC_NAMES = ("attnlens", "new")

# Characteristic `config.json` keys of architectures, most specific first.
_CHARACTERISTIC_KEYS: Mapping[str, tuple[str, ...]] = {
    "gemma3_text": ("query_pre_attn_scalar", "rms_norm_eps"),
    "qwen2": ("use_sliding_window", "rms_norm_eps"),
    "llama": ("num_key_value_heads", "rms_norm_eps"),
    "t5": ("relative_attention_num_buckets", "d_kv"),
    "deberta-v2": ("relative_attention", "pos_att_type"),
    "longformer": ("attention_window", "hidden_size"),
    "big_bird": ("num_random_blocks", "block_size"),
    "modernbert": ("local_attention", "hidden_size"),
    "nomic_bert": ("rotary_emb_base", "n_embd"),
    "gpt2": ("layer_norm_epsilon", "n_embd"),
    "gte": ("rope_theta", "layer_norm_eps"),
    "distilbert": ("n_heads", "hidden_dim"),
    "bert": ("type_vocab_size", "layer_norm_eps"),
}


def describe_unsupported(
    content: Mapping[str, object], supported: Sequence[str], of_transformers: Iterable[str] = ()
) -> str:
    """Return the error message for a `model_type` that neither attnlens nor transformers knows.

    Args:
        content: Content of the `config.json`.
        supported: Values of `model_type` that our encoder computes.
        of_transformers: Further values to suggest.
    """
    model_type = str(content["model_type"])
    hint = suggestion(model_type, [*supported, *of_transformers]) or _nearest_architecture(
        model_type, content, supported
    )
    return (
        f"model_type={model_type!r} is not known{hint}: attnlens supports the types of transformers and "
        f"{', '.join(supported)}"
    )


def _nearest_architecture(model_type: str, content: Mapping[str, object], supported: Sequence[str]) -> str:
    """Return a clause that names the most similar supported architecture, or "" if there is none.

    Keys of the configuration take precedence over the name of the model.
    """
    for name, keys in _CHARACTERISTIC_KEYS.items():
        if all(key in content for key in keys):
            return f"; the nearest supported architecture is {name}, by the keys {' and '.join(keys)}"
    names = [name for name in supported if name not in _GENERIC_NAMES]
    similar = difflib.get_close_matches(model_type, names, n=1, cutoff=_MIN_RATIO)
    return f"; the nearest supported architecture is {similar[0]}, by its name" if similar else ""


def check_directory(directory: Path) -> None:
    """Reject a directory that does not contain a complete encoder.

    Raises:
        CheckpointError: The directory contains something else. The message describes it.
    """
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        base = read_object(adapter).get("base_model_name_or_path") or "its base model"
        raise CheckpointError(
            f"{directory} contains an adapter (PEFT) for {base}, not a complete model: merge the two with "
            "peft's merge_and_unload(), save the result with save_pretrained(), and export that directory"
        )
    listed = read_json(directory / "modules.json")
    modules = [module for module in listed if isinstance(module, dict)] if isinstance(listed, list) else []
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer" and path not in ("", "."):
            raise CheckpointError(
                f"{directory} has its encoder in the subdirectory {path}, which is not supported: move the "
                "files next to modules.json, and set the path of the Transformer module in it to ''"
            )
        if kind == "StaticEmbedding":
            raise CheckpointError(
                f"{directory} contains a static embedding table without layers: use model2vec or "
                "sentence-transformers"
            )
        if kind == "CLIPModel":
            raise CheckpointError(
                f"{directory} contains a multimodal model of images and text, whose text half is not "
                "supported"
            )
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} contains no config.json: specify the directory of one model")
    _check_config(directory / "config.json")


def _check_config(path: Path) -> None:
    """Reject settings of `config.json` that change which weights transformers loads."""
    content = read_object(path)
    text = content.get("text_config")
    for settings in (content, text if isinstance(text, dict) else {}):
        if settings.get("quantization_config") is not None:
            raise CheckpointError(
                f"{path} sets quantization_config, and quantized models are not supported: use the "
                "checkpoint that this model was quantized from"
            )
        if settings.get("transformers_weights") not in (None, "model.safetensors"):
            raise CheckpointError(
                f"{path} sets transformers_weights = {settings['transformers_weights']!r}, but weights are "
                "read only from model.safetensors: rename the file, and remove the setting"
            )


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Return the content of a JSON file, or None if it is unreadable; callers report the error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty dict if there is none."""
    content = read_json(path)
    return content if isinstance(content, dict) else {}
