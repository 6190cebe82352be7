"""How the methods of both clients get their arguments: each signature is written once, in core/plans.py."""

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from attnlens.signatures import check_arguments

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
                check_arguments(f"{type(client).__name__}.{method.__name__}", signature, args, options)
                raise
            return method(client, plan)

        returned = inspect.signature(method).return_annotation
        with_arguments.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *signature.parameters.values()], return_annotation=returned
        )
        return with_arguments

    return decorate
