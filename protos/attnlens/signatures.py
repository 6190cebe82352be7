"""Calls with wrong arguments: the message names what was called and, for an unknown name, the nearest."""

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

_Class = TypeVar("_Class")


def check_call(
    called: str, signature: inspect.Signature, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Compare arguments with the signature of what was called, `self` in neither.

    Raises:
        TypeError: it can't be called like that.
    """
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        message = f"{called}() {error}"
        for name in options.keys() - signature.parameters.keys():
            message = f"{called}() has no argument {name!r}"
            nearest = difflib.get_close_matches(name, signature.parameters, n=1)
            message += (
                f": did you mean {nearest[0]!r}?"
                if nearest
                else f": it has {', '.join(signature.parameters)}"
            )
            break
        raise TypeError(message) from None


def names_its_arguments(kind: type[_Class]) -> type[_Class]:
    """Let a class, and those that inherit its `__init__`, tell of wrong arguments as `check_call` does.

    For dataclasses, put above `@dataclass`.
    """
    signature, make = inspect.signature(kind), kind.__init__

    @functools.wraps(make)
    def with_names(self: _Class, /, *args: Any, **options: Any) -> None:  # noqa: ANN401 - whatever is given
        try:
            make(self, *args, **options)
        except TypeError:
            check_call(type(self).__name__, signature, args, options)
            raise

    kind.__init__ = with_names  # type: ignore[assignment]
    return kind
