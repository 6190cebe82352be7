"""Reading and writing the protobuf wire format (https://protobuf.dev/programming-guides/encoding) by hand.

For files that are mostly weights, as those of ONNX are: a parser would hold the whole file, and what it makes
of it, in memory.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BITS = 70  # ten bytes of seven bits hold 64 bits


class Bytes(Protocol):
    """Bytes, or a file that is mapped into memory."""

    def __getitem__(self, index: int, /) -> int:
        """Return a byte; an IndexError beyond the end."""


class Field(NamedTuple):
    """A field of a message: its number and type, and where it, its content and its end are."""

    number: int
    wire_type: int
    start: int
    content: int
    end: int


def read_fields(data: Bytes, position: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message between two positions.

    Raises:
        ValueError: there is no message.
        IndexError: the data ends within a field.
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
            raise ValueError(f"wire type {wire_type} at byte {start}")
        if position > end:
            raise ValueError(f"the field at byte {start} is longer than what holds it")
        yield Field(number, wire_type, start, content, position)


def _read_varint(data: Bytes, position: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    number = shift = 0
    while shift < _MAX_VARINT_BITS:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the eighth bit says that more follow
            return number, position
        shift += 7
    raise ValueError(f"a number of more than 64 bits at byte {position}")


def start_field(number: int, length: int) -> bytes:
    """Return what precedes the content of a length-delimited field: its number, type and length in bytes."""
    return write_varint(number << 3 | LENGTH_DELIMITED) + write_varint(length)


def write_varint(number: int) -> bytes:
    """Return a number from 0 as bytes: seven bits in each, the eighth says that more follow."""
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - the largest number of seven bits
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
