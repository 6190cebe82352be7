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
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class UnsupportedTypeError(TypeError):
    """A column has a type, or a value, that a format cannot contain."""


def plain(array: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return an array without dictionaries, runs and views, also within lists, structs and maps.

    Lists of a fixed size of 0 become lists.
    pyarrow 26 cannot filter these encodings, and its casts of list views return wrong values.
    """
    if isinstance(array, pa.ChunkedArray):
        chunks = [plain(chunk) for chunk in array.chunks] or [plain(pa.nulls(0, array.type))]
        return pa.chunked_array(chunks)
    decode = next((decode for has_type, decode in _DECODERS if has_type(array.type)), None)
    return array if decode is None else decode(array)


def _plain_struct(array: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    kind = array.type
    if not kind.num_fields:
        return array
    children = [plain(child) for child in array.flatten()]
    fields = [kind.field(index).with_type(child.type) for index, child in enumerate(children)]
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())


def _plain_map(array: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    keys, items = _map_values(array)
    offsets = _offsets(array).cast(pa.int32())
    return pa.MapArray.from_arrays(offsets, plain(keys), plain(items), mask=array.is_null())


def _plain_fixed_size_list(array: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    size = array.type.list_size
    if not size:  # pyarrow divides by the size, and cannot read such lists from Parquet
        return _plain_list(array)
    values = plain(array.values.slice(array.offset * size, len(array) * size))
    kind = pa.list_(array.type.value_field.with_type(values.type), size)
    return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=array.is_null())


def _plain_list(array: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    values = plain(array.flatten())
    is_large = types.is_large_list(array.type) or types.is_large_list_view(array.type)
    field = array.type.value_field.with_type(values.type)
    kind, create = (pa.large_list, pa.LargeListArray) if is_large else (pa.list_, pa.ListArray)
    offsets = _offsets(array).cast(pa.int64() if is_large else pa.int32())
    return create.from_arrays(offsets, values, type=kind(field), mask=array.is_null())


def plain_type(kind: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the type of `plain` arrays."""
    return plain(pa.nulls(0, kind)).type


def json_values(array: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    """Return the values of a plain array for JSON.

    NaN and infinities become null, bytes base64, and dates, times, decimals and UUIDs strings. A duration is
    a number of seconds, and a map a list of pairs.

    Raises:
        UnsupportedTypeError: JSON has no value for the type, or a time is out of range.
    """
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in json_values(chunk)]
    convert = next((convert for has_type, convert in _JSON_CONVERTERS if has_type(array.type)), None)
    if convert is None:
        raise UnsupportedTypeError("JSON has no such values")
    return convert(array)


def _json_extensions(array: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    values = json_values(array.storage)
    return _converted(values, _uuid) if isinstance(array.type, pa.UuidType) else values


def _json_times(array: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    texts: list[str | None] = array.cast(pa.string()).to_pylist()
    if any(text is not None and text.startswith(_OUT_OF_RANGE) for text in texts):
        raise UnsupportedTypeError("a value is out of the range of years")
    return texts


def _json_durations(array: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    per_second = _PER_SECOND[array.type.unit]
    return _converted(array.cast(pa.int64()).to_pylist(), lambda value: value / per_second)


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


def _offsets(array: Any) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the offsets of lists in `array.flatten()`, or of maps in `_map_values`."""
    if types.is_map(array.type):
        return pc.subtract(array.offsets, array.offsets[0]).cast(pa.int64())
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    return pa.array(np.concatenate([[0], np.cumsum(lengths.to_numpy())]), pa.int64())


def _map_values(array: Any) -> tuple[Any, Any]:  # noqa: ANN401 - pyarrow has no types
    """Return the keys and items of the maps of an array, which may be a slice."""
    start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return array.keys.slice(start, end - start), array.items.slice(start, end - start)


def _is_one_of(*predicates: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda kind: any(predicate(kind) for predicate in predicates)


_is_list = _is_one_of(types.is_list, types.is_large_list, types.is_list_view, types.is_large_list_view)
_DECODERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (types.is_dictionary, lambda array: plain(array.dictionary_decode())),
    (types.is_run_end_encoded, lambda array: plain(pc.run_end_decode(array))),
    (types.is_string_view, lambda array: array.cast(pa.string())),
    (types.is_binary_view, lambda array: array.cast(pa.binary())),
    (types.is_struct, _plain_struct),
    (types.is_map, _plain_map),
    (types.is_fixed_size_list, _plain_fixed_size_list),
    (_is_list, _plain_list),
)
_JSON_CONVERTERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], list[Any]]], ...] = (
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _json_extensions),
    (types.is_struct, _json_structs),
    (_is_one_of(_is_list, types.is_fixed_size_list, types.is_map), _json_lists),
    (
        types.is_floating,
        lambda array: _converted(array.to_pylist(), lambda value: value if math.isfinite(value) else None),
    ),
    (types.is_duration, _json_durations),
    (_is_one_of(types.is_decimal, types.is_date, types.is_time, types.is_timestamp), _json_times),
    (
        _is_one_of(types.is_binary, types.is_large_binary, types.is_fixed_size_binary),
        lambda array: _converted(array.to_pylist(), lambda value: base64.b64encode(value).decode()),
    ),
    (
        _is_one_of(types.is_string, types.is_large_string, types.is_integer, types.is_boolean, types.is_null),
        lambda array: array.to_pylist(),
    ),
)
