"""The protobuf wire format, as far as it takes to look at a message without parsing it.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def length_delimited_fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the bytes of each field that holds a message, a string, bytes or packed numbers.

    It stops where the bytes are no message: a parser has to say what is wrong with them.
    """
    position = 0
    try:
        while position < len(message):
            tag, position = _varint(message, position)
            number, wire_type = tag >> 3, tag & 7
            if wire_type == _LENGTH_DELIMITED:
                length, position = _varint(message, position)
                yield number, message[position : position + length]
                position += length
            elif wire_type == _VARINT:
                _, position = _varint(message, position)
            else:
                position += _FIXED_BYTES[wire_type]
    except (IndexError, KeyError):
        return


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the number at `position`, and the position behind it."""
    number = shift = 0
    while True:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the highest bit says that another byte follows
            return number, position
        shift += 7
