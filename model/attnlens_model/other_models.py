"""Error messages for published models that are not supported."""

import json
from pathlib import Path
from typing import Any

from attnlens_model.errors import CheckpointError


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
