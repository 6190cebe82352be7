"""Merges low-rank task adapters into weights (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685).

Tensor names follow PyTorch's parametrizations, as in the code of Jina embeddings v3:

    NAME.parametrizations.weight.original    weight W
    NAME.parametrizations.weight.0.lora_A    A of all tasks, stacked along the first axis
    NAME.parametrizations.weight.0.lora_B    B of all tasks

The merged weight is W + scale * B A for a projection, and W + scale * A B for an embedding table, whose
matrices are stored in the opposite order.

Shape legend: O rows and I columns of a weight, N tasks, R rank. For a projection, A is (N, R, I) and B is
(N, O, R). For an embedding table, A is (N, O, R) and B is (N, R, I).
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from attnlens_model.errors import CheckpointError
from attnlens_model.family import TaskAdapters

NO_TASK = "none"
"""Task name that selects the weights without adapters."""

_WEIGHT = ".parametrizations.weight.original"
_TABLE = "_embeddings"
_FIRST, _SECOND = ".parametrizations.weight.0.lora_A", ".parametrizations.weight.0.lora_B"


def has_adapters(names: Mapping[str, Tensor]) -> bool:
    """Return whether a checkpoint with these tensor names contains adapters."""
    return any(name.endswith(_FIRST) for name in names)


def for_task(tensors: Mapping[str, Tensor], adapters: TaskAdapters, task: str | None) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint with the adapters of a task merged into the weights.

    Args:
        tensors: Tensors of the checkpoint, including adapters.
        adapters: Tasks and scale of the adapters.
        task: Name of a task, or `NO_TASK`.

    Returns:
        Tensors named as in a checkpoint without adapters. Adapters are merged on access.

    Raises:
        CheckpointError: `task` is None or not a task of the checkpoint.
    """
    known = ", ".join(adapters.tasks)
    if task is None:
        raise CheckpointError(
            f"the checkpoint has adapters for the tasks {known}: choose one of them (--adapter-task), or "
            f"{NO_TASK!r} for the weights without adapters"
        )
    if task != NO_TASK and task not in adapters.tasks:
        raise CheckpointError(
            f"there are no adapters for the task {task!r}: choose one of {known}, or {NO_TASK!r} for "
            "the weights without adapters"
        )
    return _Merged(tensors, adapters, None if task == NO_TASK else adapters.tasks.index(task))


class _Merged(Mapping[str, Tensor]):
    """Tensors of a checkpoint, with the adapters of one task merged."""

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
        # Embedding tables store the two matrices in the opposite order.
        left, right = (first, second) if module.endswith(_TABLE) else (second, first)
        update = None if left is None or right is None else _product(left, right)
        if update is None or update.shape != weight.shape:
            shapes = ", ".join("missing" if part is None else str(tuple(part.shape)) for part in stacked)
            raise CheckpointError(
                f"the adapters of {module} do not match its weight {tuple(weight.shape)} and "
                f"{len(self._adapters.tasks)} tasks: lora_A and lora_B have the shapes {shapes}; check that "
                "config.json and the weights belong together"
            )
        return weight.float() + self._adapters.scale * update

    def __iter__(self) -> Iterator[str]:
        return iter(self._originals)

    def __len__(self) -> int:
        return len(self._originals)

    def _of_task(self, stacked: Tensor | None, index: int) -> Tensor | None:
        """Return the matrix of one task from a stack (N, rows, columns), or None if the shape is invalid."""
        is_stack = stacked is not None and stacked.ndim == 3 and len(stacked) == len(self._adapters.tasks)  # noqa: PLR2004 - three axes
        return stacked[index].float() if stacked is not None and is_stack else None


def _product(left: Tensor, right: Tensor) -> Tensor | None:
    """Return the product (O, I) of (O, R) and (R, I), or None if the shapes do not match."""
    return left @ right if left.shape[1] == right.shape[0] else None
