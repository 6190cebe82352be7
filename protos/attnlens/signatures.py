"""TypeErrors for invalid arguments that name the called object and suggest the most similar argument name."""

import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

_Class = TypeVar("_Class")


def check_arguments(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise an error if the arguments do not match the signature. Neither includes `self`.

    Raises:
        TypeError: The arguments do not match. The message starts with `name()`.
    """
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        message = f"{name}() {error}"
        for unknown in kwargs.keys() - signature.parameters.keys():
            message = f"{name}() has no argument {unknown!r}"
            nearest = difflib.get_close_matches(unknown, signature.parameters, n=1)
            message += (
                f": did you mean {nearest[0]!r}?"
                if nearest
                else f": it has {', '.join(signature.parameters)}"
            )
            break
        raise TypeError(message) from None


def checks_arguments(cls: type[_Class]) -> type[_Class]:
    """Class decorator: raise the errors of `check_arguments` from the constructor.

    Subclasses that inherit `__init__` name themselves in the message. Put the decorator above `@dataclass`.
    """
    signature, original_init = inspect.signature(cls), cls.__init__

    @functools.wraps(original_init)
    def init(self: _Class, /, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - any arguments
        try:
            original_init(self, *args, **kwargs)
        except TypeError:
            check_arguments(type(self).__name__, signature, args, kwargs)
            raise

    cls.__init__ = init  # type: ignore[assignment]
    return cls
