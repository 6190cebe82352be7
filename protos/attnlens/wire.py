"""Minimal reader and writer for the protobuf wire format (https://protobuf.dev/programming-guides/encoding).

Used for large ONNX files: a protobuf parser would load the whole file and its parsed copy into memory.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BITS = 70  # ten bytes with seven bits each, for up to 64 bits


class Bytes(Protocol):
    """Bytes or a memory-mapped file."""

    def __getitem__(self, index: int, /) -> int:
        """Return a byte, or raise IndexError beyond the end."""


class Field(NamedTuple):
    """A field of a message: field number, wire type, and offsets of the tag, the content and the end."""

    number: int
    wire_type: int
    start: int
    content: int
    end: int


def read_fields(data: Bytes, position: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message between two offsets.

    Raises:
        ValueError: The bytes are not a valid message.
        IndexError: The data ends within a field.
    """
    while position < end:
        start = position
        tag, position = _read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            content = position
            _, position = _read_varint(data, position)
        elif wire_type == LENGTH_DELIMITED:
            length, content = _read_varint(data, position)
            position = content + length
        elif wire_type in _FIXED_SIZES:
            content, position = position, position + _FIXED_SIZES[wire_type]
        else:
            raise ValueError(f"invalid wire type {wire_type} at byte {start}")
        if position > end:
            raise ValueError(f"the field at byte {start} extends beyond the end of its message")
        yield Field(number, wire_type, start, content, position)


def _read_varint(data: Bytes, position: int) -> tuple[int, int]:
    """Return a varint and the offset after it."""
    number = shift = 0
    while shift < _MAX_VARINT_BITS:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the high bit marks continuation
            return number, position
        shift += 7
    raise ValueError(f"varint of more than 64 bits at byte {position}")


def start_field(number: int, length: int) -> bytes:
    """Return the tag and length that precede the content of a length-delimited field."""
    return write_varint(number << 3 | LENGTH_DELIMITED) + write_varint(length)


def write_varint(number: int) -> bytes:
    """Encode a non-negative integer with seven bits per byte; the high bit marks continuation."""
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - largest seven-bit value
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
