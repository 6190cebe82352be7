"""Cache of traced graphs, in the process and on disk.

A trace takes seconds and does not depend on the values of parameters. `install` wraps
`attnlens_export.graph.trace.trace` when its module is imported. An entry holds the graph and its constants;
parameters and buffers are taken from the encoder at hand. The key covers everything that a trace reads:
sources and versions, the configuration, each module's type, attributes and buffers, and the layout of its
parameters.

An encoder is traced as usual while a watched module differs from its state after import (something is
patched), or if one of its modules, hooks or attributes comes from outside attnlens_model and torch. A test
that patches torch must disable the cache.
"""

import copy
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import itertools
import os
import pickle
import platform
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from attnlens_export.graph.trace import TracedGraph
    from attnlens_model import Encoder, EncoderConfig, ModuleEncoder

ROOT = Path(__file__).parent.parent
DIRECTORY = Path(os.environ.get("TRACE_CACHE") or ROOT / ".trace_cache")
KEPT_VERSIONS = 30
TRACE_MODULE = "attnlens_export.graph.trace"
WATCHED = (
    "attnlens.patterns",
    "attnlens.wire",
    "attnlens_export.errors",
    "attnlens_export.graph",
    "attnlens_model",
)
SOURCES = ("protos/attnlens/*.py", "export/attnlens_export/errors.py", "export/attnlens_export/graph/*.py")
PACKAGES = ("numpy", "onnx", "onnx-ir", "onnxscript", "torch")
CONTAINERS = (dict, list, set)
# copy.deepcopy adds it to the classes of copied objects.
NOT_PATCHED = "__slotnames__"

_State = dict[str, dict[str, object]]


class _NotCacheable(Exception):  # noqa: N818 - control flow
    """A part of the encoder is unknown to the key."""


class TraceCache:
    """Traces of this process, and those on disk."""

    def __init__(self) -> None:
        self.is_enabled = True
        self.traced = 0
        """Number of encoders that were traced because no entry was found."""
        self._sources = _hash_sources()
        self._unpatched: dict[str, _State] = {}
        self._entries: dict[str, bytes] = {}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Trace every encoder, for the tests of the tracer itself."""
        before, self.is_enabled = self.is_enabled, False
        try:
            yield
        finally:
            self.is_enabled = before

    def record(self, module: types.ModuleType) -> None:
        """Record the state of a newly imported module, and wrap the trace function if it has it."""
        if module.__name__ == TRACE_MODULE:
            vars(module)["trace"] = self._wrapped(module.trace)
        self._unpatched[module.__name__] = _state(module)

    def _wrapped(self, trace: Callable[["Encoder", "EncoderConfig"], "TracedGraph"]) -> Any:
        @functools.wraps(trace)
        def cached(encoder: "Encoder", config: "EncoderConfig") -> "TracedGraph":
            key = self.key(encoder, config)
            if key is None:
                return trace(encoder, config)
            if key not in self._entries:
                self._entries[key] = self._load(key, lambda: _packed(trace(encoder, config), encoder))
            return _unpacked(self._entries[key], encoder)

        return cached

    def key(self, encoder: "Encoder | ModuleEncoder", config: "EncoderConfig") -> str | None:
        """Return the digest of everything that a trace reads, or None if it must not be cached."""
        if not self.is_enabled or self.is_patched():
            return None
        try:
            return _key(encoder, config)
        except _NotCacheable:
            return None

    def is_patched(self) -> bool:
        """Return whether a value of a watched module or class was replaced, added or removed."""
        return bool(self.patched_modules())

    def patched_modules(self) -> list[str]:
        """Return the names of watched modules that differ from their state after import."""
        return [
            name
            for name, before in self._unpatched.items()
            if not _is_same(_state(sys.modules[name]), before)
        ]

    def _load(self, key: str, make: Callable[[], bytes]) -> bytes:
        """Return the entry on disk. If it is missing, create it while other processes wait."""
        directory = DIRECTORY / _digest(self._sources, _versions())
        if not directory.exists():
            for old in sorted(DIRECTORY.glob("*"), key=os.path.getmtime)[:-KEPT_VERSIONS]:
                shutil.rmtree(old, ignore_errors=True)
            directory.mkdir(parents=True, exist_ok=True)
        path = directory / key
        with (directory / f"{key[:2]}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path.read_bytes()
            entry = make()
            self.traced += 1
            if _hash_sources() == self._sources:  # otherwise this process may have imported different sources
                unfinished = path.with_suffix(f".{os.getpid()}")
                unfinished.write_bytes(entry)
                unfinished.rename(path)
        return entry


def install() -> TraceCache:
    """Record the watched modules as they are imported. Call before any of them is."""
    early = [name for name in sys.modules if name.startswith(WATCHED)]
    assert not early, f"imported before the trace cache was installed: {early}"
    cache = TraceCache()
    sys.meta_path.insert(0, _Finder(cache))
    return cache


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, cache: TraceCache) -> None:
        self.cache = cache

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(WATCHED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self.cache)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, cache: TraceCache) -> None:
        super().__init__(fullname, path)
        self.cache = cache

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        self.cache.record(module)


def _state(module: types.ModuleType) -> _State:
    """Return the values of a module and of its classes, with containers copied."""
    values = vars(module)
    classes = [
        each for each in values.values() if isinstance(each, type) and each.__module__ == module.__name__
    ]
    top = {
        name: value
        for name, value in values.items()
        if not isinstance(value, types.ModuleType) and not name.startswith("__")
    }
    state: _State = {"": top} | {each.__qualname__: dict(vars(each)) for each in classes}
    for part in state.values():
        part.pop(NOT_PATCHED, None)
        part.update({name: copy.copy(value) for name, value in part.items() if type(value) in CONTAINERS})
    return state


def _is_same(now: _State, before: _State) -> bool:
    for part, values in before.items():
        found = now.get(part, {})
        if found.keys() != values.keys():
            return False
        for name, value in values.items():
            if type(value) in CONTAINERS:
                if found[name] != value:
                    return False
            elif found[name] is not value:
                return False
    return True


def _hash_sources() -> str:
    files = [
        Path(__file__),
        *ROOT.glob("model/**/*.py"),
        *(path for each in SOURCES for path in ROOT.glob(each)),
    ]
    return _digest([(str(path.relative_to(ROOT)), path.read_bytes()) for path in sorted(files)])


@functools.cache
def _versions() -> list[str]:
    return [platform.python_version(), *(importlib.metadata.version(name) for name in PACKAGES)]


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]


def _key(encoder: "Encoder | ModuleEncoder", config: "EncoderConfig") -> str:
    """Return the digest of everything that a trace reads from an encoder."""
    import torch  # noqa: PLC0415

    modules = [
        (name, _described_module(each)) for name, each in encoder.named_modules(remove_duplicate=False)
    ]
    first: dict[int, str] = {}
    tensors = [
        (
            *(name, first.setdefault(id(tensor), name), type(tensor).__name__),
            *(tensor.dtype, tensor.device, tensor.shape, tensor.stride()),
            None if isinstance(tensor, torch.nn.Parameter) else _array(tensor).tobytes(),
        )
        for name, tensor in _tensors(encoder).items()
    ]
    return _digest(_described(config), modules, tensors, torch.get_default_dtype())


def _tensors(encoder: "Encoder | ModuleEncoder") -> dict[str, "torch.Tensor"]:
    parameters = encoder.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(encoder.named_buffers(remove_duplicate=False))


def _array(tensor: "torch.Tensor") -> Any:
    return tensor.detach().numpy()


def _described_module(module: "torch.nn.Module") -> object:
    values = dict(vars(module)) | {
        name: [*vars(module)[name]] for name in ("_buffers", "_modules", "_parameters")
    }
    del values["training"]  # switched off while tracing
    return _named(type(module)), [(name, _described(value)) for name, value in sorted(values.items())]


def _described(value: object) -> object:
    """Return the content of plain data, or the name of a function, class or configuration.

    Raises:
        _NotCacheable: it is something else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    if isinstance(value, list | tuple):
        return type(value).__name__, [_described(each) for each in value]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, dict):
        return [(_described(key), _described(each)) for key, each in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _named(type(value)), _described(vars(value))
    return _named(value)


def _named(value: Any) -> str:
    """Return the qualified name of a function or class of attnlens_model or torch."""
    module, name = getattr(value, "__module__", None) or "torch", getattr(value, "__name__", "")
    if module.partition(".")[0] not in ("attnlens_model", "torch"):
        raise _NotCacheable
    if getattr(sys.modules[module], name, None) is not value:
        raise _NotCacheable
    return f"{module}.{name}"


def _packed(graph: "TracedGraph", encoder: "Encoder") -> bytes:
    """Return a graph with its constants, and the encoder locations of its other weights."""
    weights = []
    for name, array in graph.weights.items():
        source = name.removesuffix(".T")
        tensor = _tensors(encoder).get(source)
        axes = None if tensor is None else _axes(_array(tensor), array)
        weights.append((name, array) if axes is None else (name, source, axes))
    return pickle.dumps((graph.proto.SerializeToString(deterministic=True), weights, dict(graph.shapes)))


def _axes(array: Any, view: Any) -> tuple[int, ...]:
    """Return the order of axes in which `view` shows `array`."""
    views = ((axes, array.transpose(axes)) for axes in itertools.permutations(range(array.ndim)))
    interface = view.__array_interface__
    return next(axes for axes, each in views if each.__array_interface__ == interface)


def _unpacked(entry: bytes, encoder: "Encoder") -> "TracedGraph":
    import onnx  # noqa: PLC0415

    from attnlens_export.graph.trace import TracedGraph  # noqa: PLC0415 - imports torch

    proto, stored, shapes = pickle.loads(entry)
    tensors = _tensors(encoder)
    weights = {
        name: _array(tensors[where[0]]).transpose(where[1]) if len(where) > 1 else where[0]
        for name, *where in stored
    }
    return TracedGraph(onnx.ModelProto.FromString(proto), weights, shapes)
