"""Data types of results, and checks of their values."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnlens.pooling import FloatArray
from attnlens_server.errors import FieldViolation, InvalidFieldsError, InvalidResultError

FLOAT32: "np.dtype[np.float32]" = np.dtype(np.float32)
FLOAT16: "np.dtype[np.float16]" = np.dtype(np.float16)
DataType = np.dtype[np.float32] | np.dtype[np.float16]
MAX_FLOAT16 = float(np.finfo(np.float16).max)


def check_range(array: FloatArray, data_type: DataType) -> None:
    """Check that all values are in the range of the data type.

    Raises:
        InvalidFieldsError: A value would become infinite.
    """
    if data_type == FLOAT16:
        beyond = array[np.isfinite(array) & (np.abs(array) > MAX_FLOAT16)]
        if beyond.size:
            largest = beyond[np.abs(beyond).argmax()]
            problem = (
                f"is DATA_TYPE_FLOAT16, whose maximum is {MAX_FLOAT16:.0f}, but the result has the value "
                f"{largest:.6g}: use DATA_TYPE_FLOAT32"
            )
            raise InvalidFieldsError([FieldViolation("data_type", problem)])


def check_finite(vectors: npt.NDArray[np.floating], fields: Sequence[str] = ()) -> None:
    """Check that all embeddings (N, E) or logits (N, C) are finite.

    Args:
        vectors: One row for each text.
        fields: Paths of the texts. If empty, they are the inputs of the request.

    Raises:
        InvalidResultError: A value is NaN or infinite.
    """
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.all():
        row = int(is_finite.argmin())
        raise InvalidResultError(fields[row] if fields else f"inputs[{row}]")
