"""Arrays on their way into messages and back."""

import numpy as np
import pytest

from attnlens.tensors import fill_stacked, from_tensor, to_tensor
from attnlens.v1.tensor_pb2 import DataType, Tensor


@pytest.mark.parametrize("data_type", [DataType.DATA_TYPE_FLOAT32, DataType.DATA_TYPE_FLOAT16])
def test_stacked_arrays_are_packed_as_their_stack(data_type: DataType.ValueType) -> None:
    whole = np.random.default_rng(0).random((3, 4, 5, 7), dtype=np.float32)
    arrays = [whole[0], whole[1].copy(order="F"), whole[2][:, ::-1]]  # however they lie in memory
    tensor = Tensor()
    fill_stacked(tensor, arrays, data_type)
    assert tensor == to_tensor(np.stack(arrays), data_type)
    assert from_tensor(tensor).shape == (3, 4, 5, 7)
    np.testing.assert_allclose(from_tensor(tensor), np.stack(arrays), atol=1e-3)
