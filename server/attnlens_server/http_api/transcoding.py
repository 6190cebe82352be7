"""Conversion between JSON and protobuf messages, driven by their descriptors.

It follows protobuf's JSON mapping, with names as in the .proto files, and these differences:

- Enum values have a short form: `head_mean` for ATTENTION_VIEW_HEAD_MEAN.
- A Tensor is a nested list, or an object with its data in base64. NaN is null in lists.
- A duration is a number of seconds, and an int64 is a number.
- An Input may be a plain string.
- Responses contain all fields, except for optional fields and messages that are not set.
"""

import base64
import binascii
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import orjson
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from attnlens.tensors import fill_tensor, from_tensor
from attnlens.v1.tensor_pb2 import DataType
from attnlens_server.errors import FieldViolation, InvalidFieldsError
from attnlens_server.grpc_api.calls import MAX_OTHER_FIELDS
from attnlens_server.grpc_api.methods import INPUT_FIELDS
from attnlens_server.http_api.exchange import HttpError, shown

INPUT, TENSOR, TOKEN = "attnlens.v1.Input", "attnlens.v1.Tensor", "attnlens.v1.Token"
DURATION = "google.protobuf.Duration"

Convert = Callable[[Any, bool], Any]
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
}
_REALS = {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        HttpError: The body is not a JSON object.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        message = f"the body is not valid JSON: {error}. Send a JSON object"
        raise HttpError(400, "MALFORMED_REQUEST", message) from None
    if not isinstance(content, dict):
        raise HttpError(400, "MALFORMED_REQUEST", "the body is not a JSON object: send one")
    return content


def fill_message(message: Message, content: Mapping[str, Any], max_texts: int, path: str = "") -> None:
    """Set the fields of a message to JSON values.

    Args:
        message: Empty message.
        content: Values by field name.
        max_texts: Maximum length of the fields in `methods.INPUT_FIELDS`.
        path: Path of the message in the request.

    Raises:
        InvalidFieldsError: A field is unknown, or has an invalid value.
    """
    fields, filled = _fields(message.DESCRIPTOR), dict[str, str]()
    for name, value in content.items():
        field_path = f"{path}.{name}" if path else name
        field = fields.get(name)
        if field is None:
            known = ", ".join(field.name for field in message.DESCRIPTOR.fields)
            _reject(shown(field_path), f"is unknown: use {known or 'no fields'}")
        if value is None:
            continue
        group = field.containing_oneof.name if field.containing_oneof else field.name
        if group in filled:
            _reject(field_path, f"is set in addition to {filled[group]}: set one of them")
        filled[group] = name
        if field.is_repeated:
            _fill_list(getattr(message, field.name), field, value, max_texts, field_path)
        elif field.message_type is not None:
            child = getattr(message, field.name)
            child.SetInParent()
            _fill_child(child, value, max_texts, field_path)
        else:
            _checked(
                functools.partial(setattr, message, field.name), _scalar(field, value, field_path), field_path
            )


def _fill_list(
    container: Any,  # noqa: ANN401 - a repeated field
    field: FieldDescriptor,
    values: Any,  # noqa: ANN401 - any JSON value
    max_texts: int,
    path: str,
) -> None:
    if not isinstance(values, list):
        _reject(path, "is not a list: send a JSON array")
    if field.name in INPUT_FIELDS and len(values) > max_texts:
        _reject(path, f"has more than {max_texts} texts, the limit of a request: send several requests")
    if field.message_type is None:
        if field.cpp_type not in _INTEGERS or set(map(type, values)) - {int}:
            values = [_scalar(field, value, f"{path}[{index}]") for index, value in enumerate(values)]
        _checked(container.extend, values, path)
        return
    if len(values) > MAX_OTHER_FIELDS and field.name not in INPUT_FIELDS:
        _reject(path, f"has more than {MAX_OTHER_FIELDS} entries: send fewer")
    for index, value in enumerate(values):
        _fill_child(container.add(), value, max_texts, f"{path}[{index}]")


def _fill_child(message: Message, value: Any, max_texts: int, path: str) -> None:  # noqa: ANN401
    kind = message.DESCRIPTOR.full_name
    if kind == INPUT and isinstance(value, str):
        value = {"text": value}
    if kind == TENSOR and isinstance(value, list):
        _fill_tensor(message, value, path)
    elif isinstance(value, dict):
        fill_message(message, value, max_texts, path)
    else:
        expected = {INPUT: "a string or an object", TENSOR: "a list or an object"}.get(kind, "an object")
        _reject(path, f"is {shown(value)}: send {expected}")


def _fill_tensor(message: Any, values: list[Any], path: str) -> None:  # noqa: ANN401 - a Tensor
    # With another type, NumPy would give each element the size of the longest string.
    array = np.asarray(values, dtype=object)
    types = set(map(type, array.ravel()))
    if list in types:
        _reject(path, "is not a rectangular array: send lists of the same length")
    if types - {int, float}:
        _reject(path, "is not an array of numbers: send numbers only")
    with np.errstate(over="ignore"):  # infinite components are rejected by the validation
        fill_tensor(message, array.astype(np.float32), DataType.DATA_TYPE_FLOAT32)


def _scalar(field: FieldDescriptor, value: Any, path: str) -> Any:  # noqa: ANN401
    """Return the Python value of a field that is not a message."""
    kind = field.cpp_type
    if field.enum_type is not None:
        return _enum_number(field.enum_type, value, path)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return value if isinstance(value, bool) else _reject(path, f"is {shown(value)}: use true or false")
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if not isinstance(value, str):
            _reject(path, f"is {shown(value)}: send a string")
        return _decoded(value, path) if field.type == FieldDescriptor.TYPE_BYTES else value
    if kind in _INTEGERS and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        return int(value)  # protobuf's libraries write int64 as strings
    if isinstance(value, bool) or not isinstance(value, int | float):
        _reject(path, f"is {shown(value)}: send a number")
    if kind in _INTEGERS and not float(value).is_integer():
        _reject(path, f"is {shown(value)}: send an integer")
    return value if kind in _REALS else int(value)


def _enum_number(enum: EnumDescriptor, value: Any, path: str) -> int:  # noqa: ANN401
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # unknown numbers are rejected with the other fields of the typed request
    names = enum_names(enum)
    if isinstance(value, str):
        short = value.upper().removeprefix(_prefix(enum)).lower()
        for number, name in names.items():
            if name == short:
                return number
    return _reject(path, f"is {shown(value)}: use one of {', '.join(names.values())}")


def _decoded(value: str, path: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        _reject(path, "is not valid base64: encode the bytes of the array with padding")


def _checked(assign: Callable[[Any], object], value: Any, path: str) -> None:  # noqa: ANN401
    try:
        assign(value)
    except (ValueError, OverflowError) as error:
        _reject(path, f"is out of range: {error}")


def _reject(path: str, description: str) -> NoReturn:
    raise InvalidFieldsError([FieldViolation(path, description)])


@functools.cache
def _fields(descriptor: Descriptor) -> dict[str, FieldDescriptor]:
    """Return the fields by their names in the .proto file and in protobuf's JSON mapping."""
    names = {field.camelcase_name: field for field in descriptor.fields}
    return names | {field.name: field for field in descriptor.fields}


def _prefix(enum: EnumDescriptor) -> str:
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")


@functools.cache
def enum_names(enum: EnumDescriptor) -> dict[int, str]:
    """Return the short names of an enum by number."""
    return {value.number: value.name.removeprefix(_prefix(enum)).lower() for value in enum.values}


class _Field(NamedTuple):
    """How a field of a response is converted. `convert` is None for values that JSON has."""

    name: str
    is_optional: bool
    convert: Convert | None


def message_value(message: Message, as_base64: bool) -> dict[str, Any]:
    """Return the JSON value of a message. Arrays are NumPy arrays that share the message's memory.

    Args:
        message: Message.
        as_base64: Whether tensors are objects with their data in base64.
    """
    content = {}
    for name, is_optional, convert in _conversions(message.DESCRIPTOR):
        if is_optional and not message.HasField(name):
            continue
        value = getattr(message, name)
        content[name] = value if convert is None else convert(value, as_base64)
    return content


@functools.cache
def _conversions(descriptor: Descriptor) -> tuple[_Field, ...]:
    return tuple(_Field(field.name, field.has_presence, _conversion(field)) for field in descriptor.fields)


def _conversion(field: FieldDescriptor) -> Convert | None:
    if is_map(field):
        return lambda values, _: dict(values)
    convert = _single_conversion(field)
    if not field.is_repeated:
        return convert
    if convert is None:
        return lambda values, _: list(values)
    if field.message_type is not None and field.message_type.full_name == TOKEN:
        return lambda tokens, _: _serialized_tokens(tokens)
    return lambda values, as_base64: [convert(value, as_base64) for value in values]


def _serialized_tokens(tokens: Iterable[Message]) -> orjson.Fragment:
    """Serialize the tokens of a text, whose dictionaries take several times their size in JSON."""
    return orjson.Fragment(orjson.dumps([message_value(token, as_base64=False) for token in tokens]))


def _single_conversion(field: FieldDescriptor) -> Convert | None:
    if field.enum_type is not None:
        names = enum_names(field.enum_type)
        return lambda number, _: names.get(number, number)
    if field.message_type is not None:
        special: dict[str, Convert] = {TENSOR: _tensor_value, DURATION: _seconds}
        name: str = field.message_type.full_name
        convert: Convert = special.get(name, message_value)
        return convert
    return None


def is_map(field: FieldDescriptor) -> bool:
    """Return whether a field is a map. The maps of the service have strings as keys and values."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _tensor_value(tensor: Any, as_base64: bool) -> Any:  # noqa: ANN401 - a Tensor
    if not as_base64:
        return from_tensor(tensor)
    return {
        "shape": list(tensor.shape),
        "data_type": enum_names(DataType.DESCRIPTOR).get(tensor.data_type, tensor.data_type),
        "data": base64.b64encode(tensor.data).decode(),
    }


def _seconds(duration: Any, _: bool) -> float:  # noqa: ANN401 - a Duration
    return float(duration.seconds + duration.nanos / 1e9)
