"""Decides for each call who sends it and whether it is allowed, before anything is reserved for it."""

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from attnlens_server.access.audit import RefusalLog, log_changes
from attnlens_server.access.files import WatchedFiles
from attnlens_server.access.keys import KeyRing, read_keys
from attnlens_server.access.policy import GROUPS, METHODS, Policy, Rules, read_policy
from attnlens_server.clients import Client, client_at
from attnlens_server.config import ServerConfig
from attnlens_server.errors import PermissionDeniedError, RequestError, StartupError, UnauthenticatedError
from attnlens_server.rates import RateLimits

logger = logging.getLogger(__name__)

MAX_ADDRESSES = 4096
"""Number of anonymous clients whose rates are kept."""
MAX_NAME = 256
"""Number of characters of a name in a certificate. A longer name is not shortened, but refused."""
_LATIN = "latin-1"  # encoding of headers
_NO_KEY = "the key is missing: send `Authorization: Bearer KEY`"


class Caller(NamedTuple):
    """Sender of a call as a protocol describes it.

    Attributes:
        peer: Address.
        authorization: Value of the header or metadata `authorization`, or an empty string.
        is_bulk: Whether the client requested the priority `bulk`.
        certificate_name: Returns the name in the client certificate, or an empty string.
    """

    peer: str
    authorization: str = ""
    is_bulk: bool = False
    certificate_name: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class _Grant:
    """A client in both priorities, and the methods that the policy denies to it."""

    interactive: Client
    bulk: Client
    denied: frozenset[str]
    rates: RateLimits


class Access:
    """Access control of one server. Used on the event loop only.

    Args:
        model: Name of the served model.
        needs_certificate: Whether clients have certificates.
        clock: Monotonic clock, in seconds.

    Attributes:
        files: Files to watch.
    """

    def __init__(
        self,
        model: str,
        *,
        needs_certificate: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files: list[WatchedFiles[Any]] = []
        self._model = model
        self._needs_certificate = needs_certificate
        self._clock = clock
        self._keys: KeyRing | None = None
        self._policy = Policy()
        self._refusals = RefusalLog(clock)
        # Names come from the operator's key file or certificates, so their number is bounded. Addresses do
        # not, and the one that was seen least recently is forgotten.
        self._named: dict[str, _Grant] = {}
        self._anonymous: OrderedDict[str, _Grant] = OrderedDict()

    @property
    def is_on(self) -> bool:
        """Whether clients are identified."""
        return self._keys is not None or self._needs_certificate

    @property
    def needs_key(self) -> bool:
        """Whether a client without a certificate needs a key."""
        return self._keys is not None and not self.allows_anonymous

    @property
    def allows_anonymous(self) -> bool:
        """Whether clients without a key or certificate are accepted."""
        allowed = self._policy.allow_anonymous
        return not self.is_on if allowed is None else allowed

    @property
    def is_deliberately_open(self) -> bool:
        """Whether the policy states that anonymous clients are accepted."""
        return self._policy.allow_anonymous is True

    @property
    def has_open_health(self) -> bool:
        """Whether health checks need no identity."""
        return self._policy.open_health

    def use_keys(self, keys: KeyRing) -> None:
        """Replace the keys."""
        self._keys = keys

    def use_policy(self, policy: Policy) -> None:
        """Replace the policy. Used-up rates remain used up.

        Raises:
            StartupError: The policy needs identities, and the server has neither keys nor a client CA.
        """
        if policy.allow_anonymous is False and not self.is_on:
            raise StartupError(
                "the policy has allow_anonymous = false, but clients cannot identify themselves: set "
                "--api-keys or --tls-client-ca"
            )
        self._policy = policy
        for name, grant in self._named.items():
            self._named[name] = self._grant(Client(name, is_identified=True), policy.rules(name), grant.rates)
        for name, grant in self._anonymous.items():
            self._anonymous[name] = self._grant(Client(name), policy.rules(None), grant.rates)

    def identify(self, caller: Caller, methods: tuple[str, ...]) -> Client:
        """Return the sender of a call.

        Args:
            caller: The sender.
            methods: Methods that the call uses.

        Raises:
            UnauthenticatedError: The key is missing or invalid.
            PermissionDeniedError: The policy does not allow one of the methods.
        """
        name = ""
        try:
            name = self._name_of(caller)
            grant = self._named_grant(name) if name else self._anonymous_grant(caller.peer)
            if not grant.denied.isdisjoint(methods):
                raise self._denial(name, methods)
        except RequestError as error:
            self._refusals.write(error, caller.peer, name, methods[0])
            raise
        return grant.bulk if caller.is_bulk else grant.interactive

    def _name_of(self, caller: Caller) -> str:
        """Return the name of a caller. Empty if it is anonymous.

        Raises:
            UnauthenticatedError: The key is invalid, or an anonymous client is not accepted.
        """
        problem = _NO_KEY
        if self._keys is not None and caller.authorization:
            scheme, _, key = caller.authorization.partition(" ")
            if scheme.lower() == "bearer":
                name = self._keys.name_of(key.strip().encode(_LATIN, "replace"))
                if not name:
                    raise UnauthenticatedError("the key is invalid: send one of the server's keys")
                return name
        if self._needs_certificate:
            name = caller.certificate_name()
            if name:
                return name
            problem = (
                "the client certificate lacks a name: create one with a subject alternative name or a CN"
            )
        if not self.allows_anonymous:
            raise UnauthenticatedError(problem)
        return ""

    def _denial(self, name: str, methods: tuple[str, ...]) -> PermissionDeniedError:
        client, rules = name or "an anonymous client", self._policy.rules(name or None)
        remedy = "ask the operator of the server to change its policy"
        if not rules.allows_model(self._model):
            return PermissionDeniedError(
                f"{client} may not use the model {self._model!r}: {remedy}", metadata={"model": self._model}
            )
        method = next(method for method in methods if not self._policy.allows(name or None, method))
        return PermissionDeniedError(f"{client} may not call {method}: {remedy}", metadata={"method": method})

    def _named_grant(self, name: str) -> _Grant:
        grant = self._named.get(name)
        if grant is None:
            client = Client(name, is_identified=True)
            grant = self._named[name] = self._grant(client, self._policy.rules(name))
        return grant

    def _anonymous_grant(self, peer: str) -> _Grant:
        client = client_at(peer)
        grant = self._anonymous.get(client.name)
        if grant is None:
            grant = self._anonymous[client.name] = self._grant(client, self._policy.rules(None))
            if len(self._anonymous) > MAX_ADDRESSES:
                self._anonymous.popitem(last=False)
        else:
            self._anonymous.move_to_end(client.name)
        return grant

    def _grant(self, client: Client, rules: Rules, rates: RateLimits | None = None) -> _Grant:
        rates = rates or RateLimits(self._clock)
        rates.configure(*rules.rates)
        denied = METHODS - rules.methods
        if not rules.allows_model(self._model):
            denied |= METHODS - GROUPS["operations"]
        bulk = replace(client, share=rules.share, is_bulk=True, rates=rates if rules.has_rates else None)
        return _Grant(replace(bulk, is_bulk=rules.priority == "bulk"), bulk, denied, rates)


def name_in_certificate(*candidates: Sequence[str]) -> str:
    """Return the first usable name in a certificate, or an empty string.

    Args:
        candidates: Names by precedence: URIs, DNS names and e-mail addresses among the subject alternative
            names, then common names.
    """
    names = [name for names in candidates for name in names if name]
    return names[0] if names and len(names[0]) <= MAX_NAME and names[0].isprintable() else ""


def open_access(config: ServerConfig, model: str, *, has_certificates: bool) -> Access:
    """Return the access control of a configuration.

    Args:
        config: Configuration.
        model: Name of the served model.
        has_certificates: Whether the server requests certificates of clients.

    Raises:
        StartupError: A file is missing or invalid, or the policy does not fit the options.
    """
    access = Access(model, needs_certificate=has_certificates)
    keys, policy = config.api_keys, config.policy
    if keys is not None:
        access.files.append(_watched_keys(access, keys))
    if policy is not None:
        access.files.append(_watched_policy(access, policy))
    return access


def _watched_keys(access: Access, path: Path) -> WatchedFiles[KeyRing]:
    previous = None

    def apply(keys: KeyRing) -> None:
        nonlocal previous
        access.use_keys(keys)
        digests = keys.digests_by_name()
        log_changes(path, previous, digests)
        previous = digests

    return WatchedFiles([path], lambda: read_keys(path), apply)


def _watched_policy(access: Access, path: Path) -> WatchedFiles[Policy]:
    previous = None

    def apply(policy: Policy) -> None:
        nonlocal previous
        access.use_policy(policy)
        tables = {f"clients.{name}": rules for name, rules in policy.clients.items()}
        current: dict[str, Any] = {"default": policy.default, **tables}
        current |= {"allow_anonymous": policy.allow_anonymous, "open_health": policy.open_health}
        log_changes(path, previous, current)
        previous = current

    return WatchedFiles([path], lambda: read_policy(path), apply)


def warn_if_exposed(access: Access, hosts: dict[str, str]) -> None:
    """Log a warning if other machines can connect without access control.

    Args:
        access: Access control of the server.
        hosts: Hosts that the server listens on, by the option that sets them.
    """
    if access.is_on or access.is_deliberately_open:
        return
    exposed = [f"{option} {host}" for option, host in hosts.items() if not is_loopback(host)]
    if exposed:
        logger.warning(
            "NO ACCESS CONTROL: anyone who can reach this machine can use the server (%s). Set --api-keys or "
            "--tls-client-ca, listen on 127.0.0.1, or state in --policy that this is intended: "
            "allow_anonymous = true",
            ", ".join(exposed),
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host that a server listens on."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
