"""How the methods of both clients get their arguments: each signature is written once, in core/plans.py."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_Client = TypeVar("_Client")
_Plan = TypeVar("_Plan")
_Result = TypeVar("_Result")


def takes(
    make: Callable[_P, _Plan],
) -> Callable[[Callable[[_Client, _Plan], _Result]], Callable[Concatenate[_Client, _P], _Result]]:
    """Give a method the arguments of `make`: it is called with the plan that `make` makes of them.

    Type checkers, `help` and `inspect.signature` show the arguments, as if the method had them itself.
    """
    signature = inspect.signature(make)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def decorate(
        method: Callable[[_Client, _Plan], _Result],
    ) -> Callable[Concatenate[_Client, _P], _Result]:
        @functools.wraps(method)
        def with_arguments(client: _Client, /, *args: _P.args, **options: _P.kwargs) -> _Result:
            try:
                plan = make(*args, **options)
            except TypeError:
                _check_call(client, method.__name__, signature, args, options)
                raise
            return method(client, plan)

        returned = inspect.signature(method).return_annotation
        with_arguments.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *signature.parameters.values()], return_annotation=returned
        )
        return with_arguments

    return decorate


def _check_call(
    client: object,
    method: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> None:
    """Name the method that was called and, for a name that it does not know, the nearest.

    Raises:
        TypeError: it can't be called like that.
    """
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        message = f"{type(client).__name__}.{method}() {error}"
        for name in options.keys() - signature.parameters.keys():
            message = f"{type(client).__name__}.{method}() has no argument {name!r}"
            nearest = difflib.get_close_matches(name, signature.parameters, n=1)
            message += (
                f": did you mean {nearest[0]!r}?"
                if nearest
                else f": it has {', '.join(signature.parameters)}"
            )
            break
        raise TypeError(message) from None
