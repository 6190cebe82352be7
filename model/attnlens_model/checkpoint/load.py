"""`load_checkpoint`: loads an `Encoder` from a directory or from the Hugging Face Hub."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from attnlens_model.checkpoint.adapters import for_task, has_adapters
from attnlens_model.checkpoint.fitting import fit_tensors
from attnlens_model.checkpoint.published import is_ours, load_published
from attnlens_model.checkpoint.staging import CodeHook, StagedCheckpoint, open_checkpoint
from attnlens_model.checkpoint.tensor_files import read_tensors
from attnlens_model.config import EncoderConfig, read_config
from attnlens_model.encoder import Encoder
from attnlens_model.errors import CheckpointError, ConfigError, ModelError
from attnlens_model.families import family_named
from attnlens_model.module_encoder import ModuleEncoder
from attnlens_model.other_models import check_directory, read_object


@dataclass(frozen=True)
class Checkpoint:
    """An encoder with published weights, and its origin.

    Attributes:
        encoder: The fp32 encoder, on the CPU and in eval mode: ours, or that of transformers for types
            without a family.
        config: Configuration of the encoder.
        directory: Directory of the configuration and tokenizer files.
        source: Hub id, or the name (never the path) of the directory.
        unused_tensors: Names of tensors that do not belong to the encoder, such as a pooler or task heads.
        commit: Commit of the hub repository. Empty if unknown, as for a local directory.
        code: Settings that refer to custom code of the publisher, which is never executed.
        adapter_task: Task whose adapters were merged into the weights, or "none". Empty if the checkpoint
            has no adapters.
    """

    encoder: Encoder | ModuleEncoder
    config: EncoderConfig
    directory: Path
    source: str
    unused_tensors: tuple[str, ...]
    commit: str = ""
    code: tuple[CodeHook, ...] = ()
    adapter_task: str = ""

    @property
    def has_own_code(self) -> bool:
        """Whether the checkpoint has custom code."""
        return bool(self.code)


def load_checkpoint(
    source: str | Path | StagedCheckpoint,
    revision: str | None = None,
    change: Callable[[EncoderConfig], EncoderConfig] | None = None,
    *,
    adapter_task: str | None = None,
) -> Checkpoint:
    """Load a checkpoint from a directory or from the Hugging Face Hub.

    Reads `config.json` and the first existing file of `model.safetensors`, its sharded form,
    `pytorch_model.bin` and its sharded form. fp16 and bfloat16 weights are cast to fp32.

    Args:
        source: A directory, a hub id such as "sentence-transformers/all-MiniLM-L6-v2", or an open checkpoint.
        revision: Branch, tag or commit on the Hub. Defaults to the default branch.
        change: Maps the configuration in `config.json` to the configuration of the encoder. Its exceptions
            are propagated.
        adapter_task: Task whose adapters are merged into the weights, or "none". Required if the checkpoint
            has adapters; otherwise it must be None.

    Raises:
        CheckpointError: The checkpoint is missing or unreadable, tensors are missing, unexpected or have an
            invalid shape, or `adapter_task` is not a task of the checkpoint.
        ConfigError: `config.json` does not describe a supported encoder.
    """
    if not isinstance(source, StagedCheckpoint):
        with open_checkpoint(source, revision) as opened:
            checkpoint = load_checkpoint(opened, change=change, adapter_task=adapter_task)
        return dataclasses.replace(checkpoint, directory=opened.origin)
    check_directory(source.directory)
    try:
        if is_ours(source.directory):
            config, encoder, unused, merged_task = _load(source.directory, change, adapter_task)
        else:
            config, encoder, unused = _load_published(source.directory, change, adapter_task)
            merged_task = ""
    except ModelError as error:
        if CodeHook("config.json", "auto_map", "") in source.code:
            error.add_note("custom code, to which auto_map in config.json refers, is not executed")
        raise
    directory, commit = source.directory, source.commit
    return Checkpoint(encoder, config, directory, source.name, unused, commit, source.code, merged_task)


def _load(
    directory: Path, change: Callable[[EncoderConfig], EncoderConfig] | None, adapter_task: str | None
) -> tuple[EncoderConfig, Encoder | ModuleEncoder, tuple[str, ...], str]:
    """Return the configuration, the encoder, the names of unused tensors, and the task."""
    config = read_config(directory / "config.json")
    if read_object(directory / "config.json").get("is_causal") and not config.is_causal:
        raise ConfigError(
            "config.json sets is_causal, but this type is bidirectional, and transformers applies the "
            "setting to texts without padding alone: remove it from config.json"
        )
    config = config if change is None else change(config)
    # Use the meta device: loaded tensors replace the parameters, so no initialization is needed.
    with torch.device("meta"):
        encoder = Encoder(config)
    family = family_named(config.family)
    tensors = read_tensors(directory)
    if family.prepare is not None:
        tensors = family.prepare(tensors, read_object(directory / "config.json"))
    if family.read_adapters is not None and has_adapters(tensors):
        tensors = for_task(
            tensors, family.read_adapters(read_object(directory / "config.json")), adapter_task
        )
    else:
        _check_no_task(adapter_task)
    fitted = fit_tensors(tensors, encoder.state_dict(), family, config)
    encoder.load_state_dict(fitted.parameters, assign=True)
    return config, encoder.eval(), fitted.unused, adapter_task or ""


def _load_published(
    directory: Path, change: Callable[[EncoderConfig], EncoderConfig] | None, adapter_task: str | None
) -> tuple[EncoderConfig, ModuleEncoder, tuple[str, ...]]:
    _check_no_task(adapter_task)
    encoder, unused = load_published(directory)
    if change is not None:
        change(encoder.config)  # rejects choices, none of which concerns a module of transformers
    return encoder.config, encoder, unused


def _check_no_task(adapter_task: str | None) -> None:
    if adapter_task is not None:
        raise CheckpointError(
            f"the checkpoint has no task adapters, but the task {adapter_task!r} was specified: leave it out"
        )
