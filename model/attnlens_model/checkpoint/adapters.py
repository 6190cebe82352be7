"""Checkpoints that keep low-rank adapters of several tasks beside each weight (Hu et al. 2021, LoRA).

https://arxiv.org/abs/2106.09685. As PyTorch's parametrizations name them, in the code of Jina embeddings v3:

    NAME.parametrizations.weight.original    the weight W
    NAME.parametrizations.weight.0.lora_A    of all tasks, stacked along the first axis
    NAME.parametrizations.weight.0.lora_B

The weight for a task is W + scale * B A for a projection, W + scale * A B for a table of embeddings, whose
two matrices are kept the other way round.

Letters in shapes: O rows and I columns of a weight, N tasks, R rank: A is (N, R, I) and B (N, O, R) for a
projection, A (N, O, R) and B (N, R, I) for a table.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from attnlens_model.errors import CheckpointError
from attnlens_model.family import TaskAdapters

NO_TASK = "none"
"""The task that stands for the weights without any adapter."""

_WEIGHT = ".parametrizations.weight.original"
_TABLE = "_embeddings"
_FIRST, _SECOND = ".parametrizations.weight.0.lora_A", ".parametrizations.weight.0.lora_B"


def has_adapters(names: Mapping[str, Tensor]) -> bool:
    """Return whether a checkpoint with these tensors has adapters in it."""
    return any(name.endswith(_FIRST) for name in names)


def for_task(tensors: Mapping[str, Tensor], adapters: TaskAdapters, task: str | None) -> Mapping[str, Tensor]:
    """Return a checkpoint's tensors with the adapters of a task merged into the weights.

    Args:
        tensors: with adapters.
        adapters: what the checkpoint says of them.
        task: one of its tasks, or `NO_TASK`.

    Returns:
        Tensors under the names of a checkpoint without adapters, each merged when it is asked for.

    Raises:
        CheckpointError: no task was chosen, or one that it has no adapters for.
    """
    known = ", ".join(adapters.tasks)
    if task is None:
        raise CheckpointError(
            f"the checkpoint has adapters for the tasks {known}: choose one of them (--adapter-task), or "
            f"{NO_TASK!r} for its weights without any"
        )
    if task != NO_TASK and task not in adapters.tasks:
        raise CheckpointError(
            f"the checkpoint has no adapters for the task {task!r}: it has some for {known}; {NO_TASK!r} "
            "takes its weights without any"
        )
    return _Merged(tensors, adapters, None if task == NO_TASK else adapters.tasks.index(task))


class _Merged(Mapping[str, Tensor]):
    """Tensors of a checkpoint for one task."""

    def __init__(self, tensors: Mapping[str, Tensor], adapters: TaskAdapters, index: int | None) -> None:
        self._tensors, self._adapters, self._index = tensors, adapters, index
        plain = (name for name in tensors if not name.endswith((_FIRST, _SECOND)))
        self._originals = {name.replace(_WEIGHT, ".weight"): name for name in plain}

    def __getitem__(self, name: str) -> Tensor:
        original = self._originals[name]
        weight, module = self._tensors[original], original.removesuffix(_WEIGHT)
        if self._index is None or module == original:
            return weight
        stacked = [self._tensors.get(module + part) for part in (_FIRST, _SECOND)]
        if all(part is None for part in stacked):
            return weight
        first, second = (self._of_task(part, self._index) for part in stacked)
        # A table of embeddings has its two matrices the other way round.
        left, right = (first, second) if module.endswith(_TABLE) else (second, first)
        update = None if left is None or right is None else _product(left, right)
        if update is None or update.shape != weight.shape:
            shapes = ", ".join("absent" if part is None else str(tuple(part.shape)) for part in stacked)
            raise CheckpointError(
                f"the adapters of {module} do not fit its weight {tuple(weight.shape)} and "
                f"{len(self._adapters.tasks)} tasks: lora_A and lora_B are {shapes}; check that config.json "
                "and the weights belong together"
            )
        return weight.float() + self._adapters.scale * update

    def __iter__(self) -> Iterator[str]:
        return iter(self._originals)

    def __len__(self) -> int:
        return len(self._originals)

    def _of_task(self, stacked: Tensor | None, index: int) -> Tensor | None:
        """(N, rows, columns) -> (rows, columns) of one task; None where it is no such stack."""
        is_stack = stacked is not None and stacked.ndim == 3 and len(stacked) == len(self._adapters.tasks)  # noqa: PLR2004 - three axes
        return stacked[index].float() if stacked is not None and is_stack else None


def _product(left: Tensor, right: Tensor) -> Tensor | None:
    """(O, R) and (R, I) -> (O, I); None where they do not fit."""
    return left @ right if left.shape[1] == right.shape[0] else None
