"""Changes that make a response invalid."""

from collections.abc import Callable
from typing import Any

import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.tensor_pb2 import Tensor

Change = Callable[[Any], object]


def only(kind: type[Any], change: Change) -> Change:
    """Return a function that applies `change` to responses of one type."""
    return lambda reply: change(reply) if isinstance(reply, kind) else None


def put(tensor: Tensor, index: int, value: float) -> None:
    """Set one element of an fp32 tensor."""
    numbers = np.frombuffer(tensor.data, "<f4").copy()
    numbers[index] = value
    tensor.data = numbers.tobytes()


def second_text(change: Change) -> Change:
    """Return a function that applies `change` to the second text of an Encode response."""
    return only(pb.EncodeResponse, lambda reply: change(reply.results[1]))
