"""Registry of runtimes: the constant `RUNTIME` of each module in `attnlens_runtimes.adapters`."""

import difflib
import importlib
import pkgutil

from attnlens_runtimes import adapters
from attnlens_runtimes.runtime import Runtime


class UnknownRuntimeError(Exception):
    """Unknown runtime name. The message lists the known names."""


def _discover() -> dict[str, Runtime]:
    names = (info.name for info in pkgutil.iter_modules(adapters.__path__))
    modules = (importlib.import_module(f"{adapters.__name__}.{name}") for name in names)
    runtimes: list[Runtime] = [module.RUNTIME for module in modules]
    return {runtime.name: runtime for runtime in runtimes}


RUNTIMES = _discover()


def runtime_named(name: str) -> Runtime:
    """Return a runtime by name.

    Raises:
        UnknownRuntimeError: The name is unknown.
    """
    if name not in RUNTIMES:
        [similar] = difflib.get_close_matches(name, RUNTIMES, n=1, cutoff=0)
        raise UnknownRuntimeError(
            f"unknown runtime {name!r}: use one of {', '.join(RUNTIMES)} (did you mean {similar!r}?)"
        )
    return RUNTIMES[name]
