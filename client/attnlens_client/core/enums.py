"""Names of enum values as Python has them: `POOLING_LAST_TOKEN` is "last_token"."""

from functools import cache

from google.protobuf.descriptor import EnumDescriptor


def name_of(enum: EnumDescriptor, number: int) -> str:
    """Return the name of a value. A newer server may have values that are not known here: by number."""
    return _names(enum).get(number) or f"unknown ({number})"


def values(enum: EnumDescriptor) -> dict[str, int]:
    """Return the values of an enum by name, without the unspecified one."""
    return {name: number for number, name in _names(enum).items() if number}


@cache
def _names(enum: EnumDescriptor) -> dict[int, str]:
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {
        number: value.name.removeprefix(prefix).lower() for number, value in enum.values_by_number.items()
    }
