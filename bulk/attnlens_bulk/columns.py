"""Types of columns: plain ones for Arrow's encodings, and values for JSON."""

import base64
import itertools
import math
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

_OUT_OF_RANGE = "<value out of range"  # start of the text that Arrow returns for a timestamp
_SECONDS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class UnsupportedTypeError(TypeError):
    """A column has a type, or a value, that a format cannot contain."""


def plain(array: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return an array without dictionaries, runs and views, also within lists, structs and maps.

    pyarrow 26 cannot filter these encodings, and its casts of list views return wrong values.
    """
    if isinstance(array, pa.ChunkedArray):
        chunks = [plain(chunk) for chunk in array.chunks] or [plain(pa.array([], array.type))]
        return pa.chunked_array(chunks)
    kind = array.type
    if types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(array))
    if types.is_string_view(kind):
        return array.cast(pa.string())
    if types.is_binary_view(kind):
        return array.cast(pa.binary())
    if types.is_struct(kind) and kind.num_fields:
        children = [plain(child) for child in array.flatten()]
        fields = [kind.field(index).with_type(child.type) for index, child in enumerate(children)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    if types.is_map(kind):
        keys, items = _map_values(array)
        offsets = _offsets(array).cast(pa.int32())
        return pa.MapArray.from_arrays(offsets, plain(keys), plain(items), mask=array.is_null())
    if types.is_fixed_size_list(kind) and kind.list_size:  # pyarrow divides by the size
        size = kind.list_size
        values = plain(array.values.slice(array.offset * size, len(array) * size))
        result = pa.list_(kind.value_field.with_type(values.type), size)
        return pa.FixedSizeListArray.from_arrays(values, type=result, mask=array.is_null())
    if _is_list(kind):
        values = plain(array.flatten())
        is_large = types.is_large_list(kind) or types.is_large_list_view(kind)
        field = kind.value_field.with_type(values.type)
        result = pa.large_list(field) if is_large else pa.list_(field)
        create = pa.LargeListArray if is_large else pa.ListArray
        offsets = _offsets(array).cast(pa.int64() if is_large else pa.int32())
        return create.from_arrays(offsets, values, type=result, mask=array.is_null())
    return array


def plain_type(kind: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the type of `plain` arrays."""
    return plain(pa.array([], kind)).type


def json_values(array: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    """Return the values of a plain array for JSON.

    NaN and infinities become null, bytes base64, and dates, times, decimals and UUIDs strings. A duration is a
    number of seconds, and a map a list of pairs.

    Raises:
        UnsupportedTypeError: JSON has no value for the type, or a time is out of range.
    """
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in json_values(chunk)]
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        values = json_values(array.storage)
        return _converted(values, _uuid) if isinstance(kind, pa.UuidType) else values
    if types.is_struct(kind):
        return _json_structs(array)
    if _is_list(kind) or types.is_fixed_size_list(kind) or types.is_map(kind):
        return _json_lists(array)
    if types.is_floating(kind):
        return _converted(array.to_pylist(), lambda value: value if math.isfinite(value) else None)
    if types.is_duration(kind):
        return _converted(array.cast(pa.int64()).to_pylist(), lambda value: value / _SECONDS[kind.unit])
    if types.is_decimal(kind) or types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        texts = array.cast(pa.string()).to_pylist()
        if any(text is not None and text.startswith(_OUT_OF_RANGE) for text in texts):
            raise UnsupportedTypeError("a value is out of the range of years")
        return texts  # type: ignore[no-any-return]
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _converted(array.to_pylist(), lambda value: base64.b64encode(value).decode())
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if is_text or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind):
        return array.to_pylist()  # type: ignore[no-any-return]
    raise UnsupportedTypeError("JSON has no such values")


def _json_structs(array: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    names = [array.type.field(index).name for index in range(array.type.num_fields)]
    if len(set(names)) < len(names):
        raise UnsupportedTypeError("two fields have one name")
    children = [json_values(child) for child in array.flatten()] if names else []
    rows = zip(*children, strict=True) if names else itertools.repeat(())
    return [
        dict(zip(names, row, strict=True)) if is_valid else None
        for is_valid, row in zip(array.is_valid().to_pylist(), rows, strict=False)
    ]


def _json_lists(array: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    if types.is_map(array.type):
        keys, items = (json_values(values) for values in _map_values(array))
        values: list[Any] = [list(pair) for pair in zip(keys, items, strict=True)]
    else:
        values = json_values(array.flatten())
    offsets = _offsets(array).to_pylist()
    return [
        values[start:end] if is_valid else None
        for is_valid, start, end in zip(array.is_valid().to_pylist(), offsets, offsets[1:], strict=False)
    ]


def _uuid(text: str) -> str:
    return str(uuid.UUID(bytes=base64.b64decode(text)))


def _converted(values: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    return [None if value is None else convert(value) for value in values]


def _is_list(kind: Any) -> bool:  # noqa: ANN401 - pyarrow has no types
    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _offsets(array: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the offsets of lists in `array.flatten()`, or of maps in `_map_values`. Null is empty."""
    if types.is_map(array.type):
        lengths = pc.subtract(array.offsets[1:], array.offsets[:-1])
        lengths = pc.if_else(array.is_valid(), lengths, 0)
    else:
        lengths = pc.fill_null(pc.list_value_length(array), 0)
    return pa.array(np.concatenate([[0], np.cumsum(lengths.to_numpy())]), pa.int64())


def _map_values(array: Any) -> tuple[Any, Any]:  # noqa: ANN401 - pyarrow has no types
    """Return keys and items of the maps that are not null."""
    present = array.filter(array.is_valid())
    start, end = present.offsets[0].as_py(), present.offsets[-1].as_py()
    return present.keys.slice(start, end - start), present.items.slice(start, end - start)
