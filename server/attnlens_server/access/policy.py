"""Policy file in TOML: permissions, rates and share of each client."""

import dataclasses
import math
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnlens_server.errors import StartupError
from attnlens_server.rates import UNLIMITED

GROUPS: dict[str, frozenset[str]] = {
    "embeddings": frozenset({"Embed", "Tokenize"}),
    "attention": frozenset({"Encode", "EncodeStream"}),
    "explanations": frozenset({"Explain", "Compare"}),
    "scores": frozenset({"Score", "Classify"}),
    "operations": frozenset({"Metrics", "ServerReflectionInfo"}),
}
"""Groups of methods. `Metrics` is the HTTP route, all others are gRPC methods."""
METHODS = frozenset({"ModelInfer"}).union(*GROUPS.values())
"""Methods that a policy may restrict. All others describe the server and are open to each accepted client."""
ALL = "*"
MAX_SHARE, MIN_SHARE = 100.0, 0.01
PRIORITIES = ("interactive", "bulk")
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Rules:
    """Permissions, rates and share of a client, with the names of the keys in a policy file."""

    methods: frozenset[str] = METHODS
    models: frozenset[str] = frozenset({ALL})
    texts_per_second: float = UNLIMITED
    burst_texts: float | None = None
    tokens_per_second: float = UNLIMITED
    burst_tokens: float | None = None
    share: float = 1.0
    priority: str = "interactive"

    @property
    def rates(self) -> tuple[float, float, float, float]:
        """Arguments of `RateLimits.configure`. A burst defaults to the amount of one second."""
        texts, tokens = self.texts_per_second, self.tokens_per_second
        return (
            texts,
            max(1.0, texts) if self.burst_texts is None else self.burst_texts,
            tokens,
            max(1.0, tokens) if self.burst_tokens is None else self.burst_tokens,
        )

    @property
    def has_rates(self) -> bool:
        """Whether a rate is limited."""
        return min(self.texts_per_second, self.tokens_per_second) < UNLIMITED

    def allows_model(self, model: str) -> bool:
        """Return whether the client may use a model."""
        return ALL in self.models or model in self.models


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of all clients.

    Attributes:
        allow_anonymous: Whether clients without a key or certificate are accepted. If None, only if the
            server has neither keys nor a client CA.
        open_health: Whether health checks need no key.
        default: Rules of clients without rules of their own.
        clients: Rules by client name.
    """

    allow_anonymous: bool | None = None
    open_health: bool = True
    default: Rules = Rules()
    clients: Mapping[str, Rules] = field(default_factory=dict)

    def rules(self, name: str | None) -> Rules:
        """Return the rules of a client. None is an anonymous client."""
        return self.default if name is None else self.clients.get(name, self.default)

    def allows(self, name: str | None, method: str) -> bool:
        """Return whether a client may call a method."""
        return method not in METHODS or method in self.rules(name).methods


def read_policy(path: Path) -> Policy:
    """Read a policy file.

    Raises:
        StartupError: The file cannot be read, or has an unknown key or an invalid value.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read the policy {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"the policy {path} is not valid TOML: {error}") from error
    return _Reader(path).policy(content)


class _Reader:
    """Validates the content of a policy file. Errors name the file, the table and the key."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def policy(self, content: Mapping[str, Any]) -> Policy:
        flags = ("allow_anonymous", "open_health")
        self._check_names("", content, (*flags, "default", "clients"))
        for name in flags:
            self._check("", name, content.get(name, True), _is_bool, "true or false")
        tables = {name: content.get(name, {}) for name in ("default", "clients")}
        for name, table in tables.items():
            self._check("", name, table, _is_table, "a table")
        default = self._rules("[default]", tables["default"], Rules())
        clients = {}
        for name, table in tables["clients"].items():
            self._check("[clients]", name, table, _is_table, "a table [clients.NAME]")
            clients[name] = self._rules(f"[clients.{name}]", table, default)
        return Policy(content.get("allow_anonymous"), content.get("open_health", True), default, clients)

    def _rules(self, where: str, table: Mapping[str, Any], inherited: Rules) -> Rules:
        self._check_names(where, table, tuple(_VALUES))
        for name, value in table.items():
            self._check(where, name, value, *_VALUES[name])
        values = dict(table)
        if "methods" in table:
            values["methods"] = _methods(table["methods"])
        if "models" in table:
            values["models"] = frozenset(table["models"])
        rules = dataclasses.replace(inherited, **values)
        for unit in ("texts", "tokens"):
            if f"burst_{unit}" in table and getattr(rules, f"{unit}_per_second") == UNLIMITED:
                raise self._error(where, f"burst_{unit} is set without {unit}_per_second: set both")
        return rules

    def _check_names(self, where: str, table: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
        for name in table:
            if name not in allowed:
                raise self._error(where, f"unknown key {_shown(name)}: use {', '.join(allowed)}")

    def _check(
        self, where: str, name: str, value: object, is_valid: Callable[[Any], bool], allowed: str
    ) -> None:
        if not is_valid(value):
            raise self._error(where, f"{name} is {_shown(value)}: use {allowed}")

    def _error(self, where: str, message: str) -> StartupError:
        return StartupError(f"the policy {self._path}{where and f', table {where}'}: {message}")


def _methods(names: list[str]) -> frozenset[str]:
    """Return the methods of a list of methods, groups and `*`."""
    groups = {**GROUPS, ALL: METHODS}
    return frozenset().union(*(groups.get(name, frozenset({name})) for name in names))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]  # a number


def _is_burst(value: object) -> bool:
    return _is_number(value) and 1 <= value < math.inf  # type: ignore[operator]


def _is_share(value: object) -> bool:
    return _is_number(value) and MIN_SHARE <= value <= MAX_SHARE  # type: ignore[operator]


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == math.inf or abs(value) <= sys.float_info.max


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_methods(value: object) -> bool:
    return _are_names(value) and {*value} <= {*METHODS, *GROUPS, ALL}  # type: ignore[misc]


_RATE, _BURST = "a positive number, or inf for no limit", "a number from 1"
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "methods": (_are_methods, f"a list of {', '.join([ALL, *GROUPS, *sorted(METHODS)])}"),
    "models": (_are_names, f'a list of model names, or ["{ALL}"]'),
    "texts_per_second": (_is_positive, _RATE),
    "burst_texts": (_is_burst, _BURST),
    "tokens_per_second": (_is_positive, _RATE),
    "burst_tokens": (_is_burst, _BURST),
    "share": (_is_share, f"a number from {MIN_SHARE} to {MAX_SHARE:g}"),
    "priority": (lambda value: value in PRIORITIES, " or ".join(f'"{name}"' for name in PRIORITIES)),
}
