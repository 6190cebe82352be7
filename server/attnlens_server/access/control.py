"""Decides for each call who sends it and whether it is allowed, before anything is reserved for it."""

import ipaddress
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlens_server.access.audit import RefusalLog, log_changes
from attnlens_server.access.files import WatchedFiles
from attnlens_server.access.keys import RESERVED, KeyRing, read_keys
from attnlens_server.access.policy import GROUPS, METHODS, Policy, Rules, read_policy
from attnlens_server.clients import Client, client_at
from attnlens_server.config import ServerConfig
from attnlens_server.errors import PermissionDeniedError, RequestError, StartupError, UnauthenticatedError
from attnlens_server.rates import RateLimits

logger = logging.getLogger(__name__)

MAX_RECENT = 4096
"""Number of anonymous clients, and of clients with certificates, whose rates are kept."""
MAX_NAME = 256
"""Number of characters of a name in a certificate. A longer name is not shortened, but refused."""
MAX_SHOWN_NAMES = 10
_LATIN = "latin-1"  # encoding of headers
_NO_KEY = "the key is missing: send `Authorization: Bearer KEY`"
_NO_NAME = (
    "the client certificate lacks a name: create one with a subject alternative name or a CN, other than "
    f"{' and '.join(sorted(RESERVED))}"
)
_SAME_NAME = "the client certificate has the name of an API key: send the key, or use another certificate"


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
        self._key_names: frozenset[str] = frozenset()
        self._is_open = not needs_certificate  # nobody can be identified
        self._policy = Policy()
        self._refusals = RefusalLog(clock)
        # Names of keys come from the operator's file, so their number is bounded. Addresses and names in
        # certificates do not, and the oldest one is forgotten.
        self._named: dict[str, _Grant] = {}
        self._certified: dict[str, _Grant] = {}
        # Hashing a key costs more than all other checks when its code is not in the processor's cache. So the
        # headers of valid keys are remembered. As in `KeyRing`, their index is a hash with a random key of
        # this process (SipHash), and a header is compared only if all 64 bits of its hash are equal.
        self._by_header: dict[str, _Grant] = {}
        self._anonymous: dict[str, _Grant] = {}

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
        self._keys, self._key_names = keys, keys.names
        self._is_open = False
        self._by_header.clear()
        self._warn_of_unknown_names()

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
        self._by_header.clear()
        for grants in (self._named, self._certified):
            for name, grant in grants.items():
                client = Client(name, is_identified=True)
                grants[name] = self._grant(client, policy.rules(name), grant.rates)
        for name, grant in self._anonymous.items():
            self._anonymous[name] = self._grant(Client(name), policy.rules(None), grant.rates)
        self._warn_of_unknown_names()

    def _warn_of_unknown_names(self) -> None:
        """Log a warning about tables of the policy that no key belongs to. Certificates may have any name."""
        if self._keys is None or self._needs_certificate:
            return
        unknown = self._policy.clients.keys() - self._keys.digests_by_name().keys()
        if unknown:
            names = ", ".join(sorted(unknown)[:MAX_SHOWN_NAMES])
            logger.warning("the policy has tables for clients without a key: %s. Check their names", names)

    def identify(
        self,
        peer: str,
        methods: tuple[str, ...],
        authorization: str = "",
        certificate_name: Callable[[], str] = str,
        *,
        is_bulk: bool = False,
    ) -> Client:
        """Return the sender of a call.

        Args:
            peer: Address of the sender.
            methods: Methods that the call uses.
            authorization: Value of the header or metadata `authorization`, or an empty string.
            certificate_name: Returns the name in the client certificate, or an empty string.
            is_bulk: Whether the client requested the priority `bulk`.

        Raises:
            UnauthenticatedError: The key is missing or invalid.
            PermissionDeniedError: The policy does not allow one of the methods.
        """
        name = ""
        try:
            grant = self._by_header.get(authorization)
            if grant is None:
                grant = self._grant_of(peer, authorization, certificate_name)
            if not grant.denied.isdisjoint(methods):
                client = grant.interactive
                name = client.name if client.is_identified else ""
                raise self._denial(name, methods)
        except RequestError as error:
            self._refusals.write(error, peer, name, methods[0])
            raise
        return grant.bulk if is_bulk else grant.interactive

    def _grant_of(self, peer: str, header: str, certificate_name: Callable[[], str]) -> _Grant:
        """Return the permissions of a sender.

        Raises:
            UnauthenticatedError: The key is invalid, or an anonymous client is not accepted.
        """
        if self._is_open:
            return self._anonymous_grant(peer)
        problem = _NO_KEY
        if self._keys is not None and header:
            scheme, _, key = header.partition(" ")
            if scheme.lower() == "bearer":
                name = self._keys.name_of(key.strip().encode(_LATIN, "replace"))
                if not name:
                    raise UnauthenticatedError("the key is invalid: send one of the server's keys")
                grant = self._named_grant(name)
                if header == f"Bearer {key.strip()}":  # one header per key, so their number is bounded
                    self._by_header[header] = grant
                return grant
        if self._needs_certificate:
            name = certificate_name()
            if name and name not in self._key_names:
                return self._certified_grant(name)
            problem = _SAME_NAME if name else _NO_NAME
        if not self.allows_anonymous:
            raise UnauthenticatedError(problem)
        return self._anonymous_grant(peer)

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

    def _certified_grant(self, name: str) -> _Grant:
        client = Client(name, is_identified=True)
        return self._recent_grant(self._certified, client)

    def _anonymous_grant(self, peer: str) -> _Grant:
        return self._recent_grant(self._anonymous, client_at(peer))

    def _recent_grant(self, grants: dict[str, _Grant], client: Client) -> _Grant:
        grant = grants.get(client.name)
        if grant is None:
            rules = self._policy.rules(client.name if client.is_identified else None)
            grant = grants[client.name] = self._grant(client, rules)
            if len(grants) > MAX_RECENT:
                del grants[next(iter(grants))]
        return grant

    def _grant(self, client: Client, rules: Rules, rates: RateLimits | None = None) -> _Grant:
        rates = rates or RateLimits(self._clock)
        rates.configure(*rules.rates)
        denied = METHODS - rules.methods
        if not rules.allows_model(self._model):
            denied |= METHODS - GROUPS["operations"]
        own_rates = rates if rules.has_rates else None
        bulk = replace(client, share=rules.share, is_bulk=True, rates=own_rates, denied=denied)
        return _Grant(replace(bulk, is_bulk=rules.priority == "bulk"), bulk, denied, rates)


def name_in_certificate(*candidates: Sequence[str]) -> str:
    """Return the first usable name in a certificate, or an empty string.

    Args:
        candidates: Names by precedence: URIs, DNS names and e-mail addresses among the subject alternative
            names, then common names.
    """
    names = [name for names in candidates for name in names if name]
    is_usable = names and len(names[0]) <= MAX_NAME and names[0].isprintable() and names[0] not in RESERVED
    return names[0] if is_usable else ""


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


METRICS_HOST = "--metrics-host"
"""Option with the host of the metrics port, which never has access control."""


def warn_if_exposed(access: Access, hosts: dict[str, str]) -> None:
    """Log a warning if other machines can connect without access control.

    Args:
        access: Access control of the server.
        hosts: Hosts that the server listens on, by the option that sets them.
    """
    exposed = [f"{option} {host}" for option, host in hosts.items() if not is_loopback(host)]
    if access.is_deliberately_open:
        return
    if access.is_on:
        if METRICS_HOST in hosts and not is_loopback(hosts[METRICS_HOST]):
            logger.warning(
                "the metrics port has no access control: anyone who can reach this machine can read the "
                "names and the usage of clients (%s %s). Let only your monitoring connect to it",
                METRICS_HOST,
                hosts[METRICS_HOST],
            )
    elif exposed:
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
