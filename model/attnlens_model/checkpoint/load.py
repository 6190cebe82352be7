"""Published weights in a directory or on the Hub -> an `Encoder`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from attnlens_model.checkpoint.adapters import for_task, has_adapters
from attnlens_model.checkpoint.fitting import fit_tensors
from attnlens_model.checkpoint.hub import locate_checkpoint
from attnlens_model.checkpoint.tensor_files import read_tensors
from attnlens_model.config import EncoderConfig, read_config
from attnlens_model.encoder import Encoder
from attnlens_model.errors import CheckpointError, ModelError
from attnlens_model.families import family_named
from attnlens_model.other_models import check_directory, read_object


@dataclass(frozen=True)
class Checkpoint:
    """An encoder with published weights, and where it came from.

    Attributes:
        encoder: in eval mode, fp32, on the CPU.
        config: what the encoder was built from.
        directory: where the configuration and tokenizer files are.
        source: the hub id, or the name (never the path) of the directory.
        unused_tensors: names of tensors that do not belong to the encoder: pooler and task heads.
        commit: of the hub's repository; empty where it is not known, as for a directory.
        has_own_code: whether the publisher has code for it, which is not run.
        adapter_task: whose adapters were merged into the weights, or "none"; empty: the checkpoint has none.
    """

    encoder: Encoder
    config: EncoderConfig
    directory: Path
    source: str
    unused_tensors: tuple[str, ...]
    commit: str = ""
    has_own_code: bool = False
    adapter_task: str = ""


def load_checkpoint(
    source: str | Path,
    revision: str | None = None,
    change: Callable[[EncoderConfig], EncoderConfig] | None = None,
    *,
    adapter_task: str | None = None,
) -> Checkpoint:
    """Load a checkpoint from a directory or from the Hugging Face Hub.

    What is read is `config.json` and the first that exists of `model.safetensors`, its sharded form,
    `pytorch_model.bin`, its sharded form. Weights in fp16 or bfloat16 are cast to fp32.

    Args:
        source: a directory, or a hub id such as "sentence-transformers/all-MiniLM-L6-v2".
        revision: branch, tag or commit on the Hub; None is its default branch.
        change: gets what `config.json` says and returns the configuration to load the weights into; what it
            raises is passed on.
        adapter_task: Task whose adapters are merged into the weights, or "none". Required if the checkpoint
            has adapters for tasks, rejected otherwise.

    Raises:
        CheckpointError: not found or unreadable, tensors are missing, unexpected or misshapen, or
            `adapter_task` is not one of the checkpoint's.
        ConfigError: `config.json` describes no encoder that is supported.
    """
    location = locate_checkpoint(source, revision)
    check_directory(location.directory)
    has_own_code = "auto_map" in read_object(location.directory / "config.json")
    try:
        config, encoder, unused, found = _load(location.directory, change, adapter_task)
    except ModelError as error:
        if has_own_code:
            error.add_note("the publisher's own code, which config.json names under auto_map, is not run")
        raise
    directory, commit = location.directory, location.commit
    return Checkpoint(encoder, config, directory, location.name, unused, commit, has_own_code, found)


def _load(
    directory: Path, change: Callable[[EncoderConfig], EncoderConfig] | None, adapter_task: str | None
) -> tuple[EncoderConfig, Encoder, tuple[str, ...], str]:
    """Return the encoder, its configuration, the tensors that it has no use for by name, and the task."""
    config = read_config(directory / "config.json")
    config = config if change is None else change(config)
    # Without storage at first: the parameters are replaced by the loaded ones, and no random number is drawn.
    with torch.device("meta"):
        encoder = Encoder(config)
    family = family_named(config.family)
    tensors = read_tensors(directory)
    if family.read_adapters is not None and has_adapters(tensors):
        tensors = for_task(
            tensors, family.read_adapters(read_object(directory / "config.json")), adapter_task
        )
    elif adapter_task is not None:
        raise CheckpointError(
            f"the checkpoint has no adapters, for the task {adapter_task!r} or another: choose none"
        )
    fitted = fit_tensors(tensors, encoder.state_dict(), family, config)
    encoder.load_state_dict(fitted.parameters, assign=True)
    return config, encoder.eval(), fitted.unused, adapter_task or ""
