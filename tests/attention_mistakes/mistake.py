"""A mistake that somebody could make in a mechanism, made on purpose for as long as a context is open."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Mistake:
    """A function of a mechanism, and its incorrect replacement.

    Attributes:
        name: Description of the mistake.
        owner: the module or class that has the function.
        function: its name.
        wrong: called in its place, with the right function and then the arguments.
    """

    name: str
    owner: Any
    function: str
    wrong: Callable[..., Any]

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def made(self) -> Iterator[list[str]]:
        """Make the mistake; each call of the function adds its name to the list."""
        right, calls = getattr(self.owner, self.function), list[str]()

        def replaced(*args: Any, **kwargs: Any) -> Any:
            calls.append(self.function)
            return self.wrong(right, *args, **kwargs)

        with mock.patch.object(self.owner, self.function, replaced):
            yield calls


class Changed:
    """A module of which some attributes are others, for its own methods as well."""

    def __init__(self, module: Any, **attributes: Any) -> None:
        self._module = module
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        is_own = isinstance(value, types.MethodType) and value.__self__ is self._module
        return types.MethodType(value.__func__, self) if is_own else value
