"""The registry of runtimes: every module of `attnlens_runtimes.adapters` that defines `RUNTIME`."""

import difflib
import importlib
import pkgutil

from attnlens_runtimes import adapters
from attnlens_runtimes.runtime import Runtime


class UnknownRuntimeError(Exception):
    """There is no runtime of that name; the message names those that exist."""


def _discover() -> dict[str, Runtime]:
    names = (info.name for info in pkgutil.iter_modules(adapters.__path__))
    modules = (importlib.import_module(f"{adapters.__name__}.{name}") for name in names)
    runtimes: list[Runtime] = [module.RUNTIME for module in modules]
    return {runtime.name: runtime for runtime in runtimes}


RUNTIMES = _discover()


def runtime_named(name: str) -> Runtime:
    """Return the runtime that is called `name`.

    Raises:
        UnknownRuntimeError: there is none.
    """
    if name not in RUNTIMES:
        [*near] = difflib.get_close_matches(name, RUNTIMES, n=1, cutoff=0)
        raise UnknownRuntimeError(
            f"there is no runtime {name!r}: choose one of {', '.join(RUNTIMES)} (nearest: {near[0]!r})"
        )
    return RUNTIMES[name]
