"""Changes that make a reply wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.tensor_pb2 import Tensor

Change = Callable[[Any], object]


def only(kind: type[Any], change: Change) -> Change:
    """Return `change` for replies of one kind."""
    return lambda reply: change(reply) if isinstance(reply, kind) else None


def put(tensor: Tensor, index: int, value: float) -> None:
    """Set one number of a tensor in fp32."""
    numbers = np.frombuffer(tensor.data, "<f4").copy()
    numbers[index] = value
    tensor.data = numbers.tobytes()


def second_text(change: Change) -> Change:
    """Return `change` for the second text of an `encode`."""
    return only(pb.EncodeResponse, lambda reply: change(reply.results[1]))
