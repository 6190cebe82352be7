"""Loads encoders of transformers for which attnlens has no family, see `PublishedModule`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attnlens_model.errors import CheckpointError, ConfigError, ModelError, suggestion
from attnlens_model.families import SUPPORTED_TYPES
from attnlens_model.families.config_json.layers import check_custom_code
from attnlens_model.module_encoder import ModuleEncoder
from attnlens_model.other_models import read_object
from attnlens_model.published_encoder import check_direction, wrap_published

_TEXT_PREFIX = r"^(model\.)?language_model\."
"""Prefix of the tensors of the text encoder in a multimodal checkpoint."""
_MAX_NAMES = 3
_MAX_REASON = 300


def is_ours(directory: Path) -> bool:
    """Return whether our encoder computes the checkpoint, or its `config.json` states no type."""
    model_type = read_object(directory / "config.json").get("model_type")
    return not isinstance(model_type, str) or model_type in SUPPORTED_TYPES


def is_published(directory: Path) -> bool:
    """Return whether transformers computes the checkpoint: it has the type, and our encoder does not."""
    return not is_ours(directory) and _is_known(str(read_object(directory / "config.json")["model_type"]))


def load_published(directory: Path) -> tuple[ModuleEncoder, tuple[str, ...]]:
    """Load the encoder of a checkpoint with transformers: of a multimodal checkpoint, that of texts.

    Args:
        directory: Checkpoint directory. Custom code is not run.

    Returns:
        The encoder in fp32, on the CPU and in eval mode, and the names of tensors that it does not use.

    Raises:
        ConfigError: transformers has no such model type, or its encoder can't be wrapped.
        CheckpointError: transformers can't load the checkpoint, or tensors are missing.
    """
    content = read_object(directory / "config.json")
    model_type = str(content["model_type"])
    if not _is_known(model_type):
        from transformers import CONFIG_MAPPING  # noqa: PLC0415

        hint = suggestion(model_type, [*SUPPORTED_TYPES, *CONFIG_MAPPING])
        raise ConfigError(
            f"model_type={model_type!r} is not known{hint}: attnlens supports the types of transformers and "
            f"{', '.join(SUPPORTED_TYPES)}"
        )
    text = content.get("text_config")
    part: dict[str, Any] = {}
    with _explained(model_type):
        if isinstance(text, dict) and "model_type" in text:
            model_type = str(text["model_type"])
            part = {"config": _config_class(model_type).from_dict(text), "key_mapping": {_TEXT_PREFIX: ""}}
        model, info = _class_of(model_type).from_pretrained(
            directory,
            **part,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        # A task head of the checkpoint, and a pooler that it lacks, are no part of the encoder.
        missing = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
        for name, parameter in model.named_parameters():
            if name in missing:
                parameter.data.fill_(torch.nan)
        encoder = wrap_published(model.eval(), model_type)
        if encoder.config.is_causal:
            check_custom_code(content, "is_causal", "use_bidirectional_attention")
    _check_complete(encoder, sorted(missing))
    with _explained(model_type):
        check_direction(model, is_causal=encoder.config.is_causal)
    return encoder, tuple(sorted(info["unexpected_keys"]))


def new_published(directory: Path, model_type: str) -> ModuleEncoder:
    """Return the encoder that a bundle's `config.json` describes, with random weights.

    Args:
        directory: Bundle directory.
        model_type: `model_type` in its `config.json`.

    Raises:
        ConfigError: See `load_published`.
    """
    with _explained(model_type):
        import transformers  # noqa: PLC0415

        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        model = _class_of(model_type).from_config(config, dtype=torch.float32, attn_implementation="eager")
        return wrap_published(model.eval(), model_type)


@contextlib.contextmanager
def _explained(model_type: str) -> Iterator[None]:
    """Convert exceptions of transformers."""
    cause: Exception
    try:
        with _quiet():
            yield
    except ModelError as error:
        cause, reason = error, str(error)
    except ImportError as error:
        name = (error.name or "transformers").partition(".")[0]
        raise ConfigError(
            f"model_type={model_type!r} is exported from the module of transformers, which needs {name}: "
            f'pip install "attnlens[export]"'
        ) from error
    except Exception as error:  # noqa: BLE001 - invalid files can raise anything in transformers
        cause, reason = error, f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}"
    else:
        return
    raise ConfigError(
        f"model_type={model_type!r} can't be exported from its module of transformers: {reason}"
    ) from cause


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress reports of transformers, which `load_published` replaces."""
    from transformers import logging  # noqa: PLC0415

    messages: Any = logging
    level = messages.get_verbosity()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)


def _is_known(model_type: str) -> bool:
    """Return whether transformers has a type. If it is not installed, the export says so."""
    try:
        from transformers import CONFIG_MAPPING  # noqa: PLC0415
    except ImportError:
        return True
    return model_type in CONFIG_MAPPING


def _class_of(model_type: str) -> Any:  # noqa: ANN401 - a class of transformers
    """Return the class that loads the encoder. Encoder-decoders have one for their encoder alone."""
    import transformers  # noqa: PLC0415

    is_listed = _config_class(model_type) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
    return transformers.AutoModelForTextEncoding if is_listed else transformers.AutoModel


def _config_class(model_type: str) -> Any:  # noqa: ANN401 - a class of transformers
    from transformers import CONFIG_MAPPING  # noqa: PLC0415

    return CONFIG_MAPPING[model_type]


def _check_complete(encoder: ModuleEncoder, missing: list[str]) -> None:
    """Check that the results do not depend on tensors that the checkpoint lacks, which are NaN."""
    if not missing:
        return
    ids = torch.zeros((1, 2), dtype=torch.int64)
    with torch.inference_mode():
        result = encoder(ids, torch.ones_like(ids)).last_hidden_state
    if not bool(result.isfinite().all()):
        more = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
        raise CheckpointError(
            f"the checkpoint lacks tensors of the encoder: {', '.join(missing[:_MAX_NAMES])}{more}: save the "
            "complete model with save_pretrained"
        )
