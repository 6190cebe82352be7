"""What an export decided, in lines for whoever ran it."""

from collections.abc import Iterator
from pathlib import Path

from attnlens.bundle import embedding_size
from attnlens.v1.manifest_pb2 import Activation, Dense, Manifest, Pooling
from attnlens_export.published.modules import MODULES_FILE
from attnlens_model import NO_TASK

# Heads of bge-m3 for other kinds of retrieval, beside the weights.
_HEAD_FILES = ("colbert_linear.pt", "sparse_linear.pt")


def describe_decisions(
    manifest: Manifest, source: Path | None, *, is_chosen: bool, has_head: bool, adapter_task: str = ""
) -> tuple[str, ...]:
    """Return a line each on embeddings, prompts, the longest input and, where there is one, the task.

    Args:
        manifest: the bundle's.
        source: the checkpoint's directory; None for a fresh encoder.
        is_chosen: whether pooling or normalization was asked for.
        has_head: whether the checkpoint is used for something else than embeddings.
        adapter_task: Task whose adapters were merged into the weights, or `NO_TASK`. Empty if the checkpoint
            has no adapters.
    """
    if source is not None and not has_head and (source / MODULES_FILE).exists():
        origin = "changed from what the checkpoint says" if is_chosen else "as the checkpoint says"
    elif is_chosen:
        origin = "as asked for"
    else:
        origin = "the default of a newly initialized encoder, see --pooling and --normalize"
    width = embedding_size(manifest)
    positions = manifest.architecture.max_position_embeddings
    longest = (
        f"{manifest.max_tokens} tokens, the publisher's limit (the encoder takes {positions})"
        if manifest.max_tokens < positions
        else f"{positions} tokens, all that the encoder takes"
    )
    return (
        f"embeddings: {'; '.join(_steps(manifest))}; {width} components ({origin})",
        f"prompts: {_prompts(manifest)}",
        f"longest input: {longest}",
        *_task(adapter_task),
    )


def _task(task: str) -> Iterator[str]:
    if task == NO_TASK:
        yield "task: none; the adapters of all tasks are left out, as asked for"
    elif task:
        yield f"task: {task}, whose adapters are merged into the weights, as asked for"


def describe_losses(source: Path, *, has_own_code: bool) -> Iterator[str]:
    """Yield a warning for each part of a checkpoint that a bundle lacks and that somebody might count on."""
    heads = [name for name in _HEAD_FILES if (source / name).exists()]
    if heads:
        yield f"{' and '.join(heads)} are left out: the bundle gives dense embeddings alone"
    if has_own_code:
        yield (
            "the publisher's own code (auto_map in config.json) was not run: the graphs are those of "
            "attnlens's encoder with these weights"
        )


def _steps(manifest: Manifest) -> Iterator[str]:
    pooling = manifest.pooling
    excluded = ", those of a prompt left out" if pooling.exclude_prompt else ""
    yield f"{Pooling.Name(pooling.pooling).removeprefix('POOLING_').lower()} over the tokens{excluded}"
    for layer in pooling.dense:
        if layer.normalize_input:
            yield "scaled to length 1"
        yield _dense(layer)
    yield "scaled to length 1" if pooling.normalize else "not normalized"
    if pooling.truncate_dim:
        yield "cut"


def _dense(layer: Dense) -> str:
    activation = Activation.Name(layer.activation).removeprefix("ACTIVATION_").lower()
    bias = "" if layer.bias else ", no bias"
    return f"dense {layer.in_features} -> {layer.out_features} ({activation}{bias})"


def _prompts(manifest: Manifest) -> str:
    prompts = (
        f"{name} {text!r}" + (" (default)" if name == manifest.default_prompt_name else "")
        for name, text in sorted(manifest.prompts.items())
    )
    return ", ".join(prompts) or "none"
