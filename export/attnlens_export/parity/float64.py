"""An fp32 encoder in float64 arithmetic, without a float64 copy of it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# What only picks elements: the result is cast instead of the table, which may be most of an encoder.
_LOOKUPS: frozenset[Callable[..., Any]] = frozenset({nn.functional.embedding, Tensor.__getitem__})


class Float64Arithmetic(TorchFunctionMode):
    """While active, every operation gets its fp32 tensors as float64.

    Every float64 holds every fp32 value exactly, so a module computes what its `.double()` copy would, from
    the same parameters. They are cast one at a time, where an operation reads them, and only for as long.
    Tensors that are float64 already, such as tables of angles, are used as they are.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        """Run one operation."""
        del types
        if func in _LOOKUPS:
            return _exact(func(*args, **(kwargs or {})))
        return func(*pytree.tree_map(_exact, args), **pytree.tree_map(_exact, kwargs or {}))


def _exact(value: Any) -> Any:  # noqa: ANN401 - any argument of an operation
    is_fp32 = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.double() if is_fp32 else value
