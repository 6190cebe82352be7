"""Who sends a call, and whether it is allowed."""

import hashlib
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens_server.access import Access, name_in_certificate, warn_if_exposed
from attnlens_server.access.audit import RefusalLog, log_changes
from attnlens_server.access.control import MAX_RECENT
from attnlens_server.access.files import WatchedFiles
from attnlens_server.access.keys import KeyRing
from attnlens_server.access.policy import METHODS, Policy, Rules, read_policy
from attnlens_server.clients import Client
from attnlens_server.errors import (
    PermissionDeniedError,
    RateLimitedError,
    RequestError,
    StartupError,
    UnauthenticatedError,
)

PEER = "ipv4:10.0.0.1:5000"
KEYS = {"search": "one", "import": "two"}


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(policy: Policy | None = None, *, keys: bool = True, certificates: bool = False) -> Access:
    access = Access("minilm", needs_certificate=certificates, clock=Time())
    if keys:
        access.use_keys(KeyRing({hashlib.sha256(key.encode()).digest(): name for name, key in KEYS.items()}))
    if policy is not None:
        access.use_policy(policy)
    return access


def identify(access: Access, key: str | None = None, method: str = "Embed", **caller: Any) -> Client:
    authorization = "" if key is None else f"Bearer {key}"
    return access.identify(PEER, (method,), authorization, **caller)


def test_a_key_names_its_client() -> None:
    access = make()
    assert identify(access, "one") == Client("search", is_identified=True)
    assert identify(access, "two").name == "import"
    assert access.identify(PEER, ("Embed",), "bearer  one ").name == "search"


@pytest.mark.parametrize(
    "authorization", ["", "one", "Bearer", "Bearer ", "Bearer One", "Basic one", "Bearer ü€"]
)
def test_calls_without_a_valid_key_are_refused(authorization: str) -> None:
    with pytest.raises(UnauthenticatedError, match=r"the key is (missing|invalid): send"):
        make().identify(PEER, ("Embed",), authorization)


def test_without_access_control_clients_have_their_address() -> None:
    access = make(keys=False)
    assert identify(access, "anything") == Client("10.0.0.1")
    assert identify(access, is_bulk=True) == Client("10.0.0.1", is_bulk=True)


def test_a_wrong_key_is_refused_even_if_no_key_is_needed() -> None:
    access = make(Policy(allow_anonymous=True))
    assert identify(access).name == "10.0.0.1"
    with pytest.raises(UnauthenticatedError, match="the key is invalid"):
        identify(access, "wrong")


def test_only_one_header_of_each_key_is_remembered() -> None:
    access = make()
    for header in ("Bearer one", "bearer one", "Bearer  one", "Bearer one ", "Bearer two", "Bearer wrong"):
        with suppress(UnauthenticatedError):
            access.identify(PEER, ("Embed",), header)
    assert set(access._by_header) == {"Bearer one", "Bearer two"}


def test_a_key_precedes_a_certificate() -> None:
    access = make(certificates=True)
    assert identify(access, "one", certificate_name=lambda: "robot").name == "search"
    assert identify(access, certificate_name=lambda: "robot").name == "robot"
    with pytest.raises(UnauthenticatedError, match="the key is invalid"):
        identify(access, "wrong", certificate_name=lambda: "robot")
    with pytest.raises(UnauthenticatedError, match="the client certificate lacks a name"):
        identify(access, certificate_name=lambda: "")


def test_a_certificate_cannot_replace_a_key_or_have_a_reserved_name() -> None:
    access = make(certificates=True)
    with pytest.raises(UnauthenticatedError, match="has the name of an API key: send the key"):
        identify(access, certificate_name=lambda: "search")
    assert identify(access, "one", certificate_name=lambda: "search").name == "search"
    assert [name_in_certificate([name]) for name in ("anonymous", "other", "others")] == ["", "", "others"]


def test_names_in_certificates_are_forgotten_if_there_are_too_many() -> None:
    access = make(certificates=True)
    identify(access, "one", certificate_name=str)
    for number in range(MAX_RECENT + 10):
        identify(access, certificate_name=f"pod-{number}".__str__)
    assert (len(access._certified), len(access._named)) == (MAX_RECENT, 1)


def test_keys_are_ignored_if_only_certificates_count() -> None:
    access = make(keys=False, certificates=True)
    assert identify(access, "unused", certificate_name=lambda: "robot").name == "robot"


@pytest.mark.parametrize(
    ("candidates", "name"),
    [
        ([["spiffe://a/b"], ["a.example"], [], ["cn"]], "spiffe://a/b"),
        ([[], ["a.example", "b.example"], [], ["cn"]], "a.example"),
        ([[], [], ["a@b.example"], ["cn"]], "a@b.example"),
        ([[], [], [], ["search service"]], "search service"),
        ([[], [], [], []], ""),
        ([["a\nb"], ["a.example"]], ""),
        ([["a" * 257], ["b"]], ""),
    ],
)
def test_the_name_of_a_certificate_is_its_first_alternative_name(
    candidates: list[list[str]], name: str
) -> None:
    assert name_in_certificate(*candidates) == name


@given(st.lists(st.sampled_from(sorted(METHODS)), unique=True), st.sampled_from(sorted(METHODS)))
def test_decisions_are_those_of_the_policy(names: list[str], method: str) -> None:
    policy = Policy(clients={"search": Rules(methods=frozenset(names))})
    access = make(policy)
    try:
        identify(access, "one", method)
    except PermissionDeniedError as error:
        assert not policy.allows("search", method)
        assert error.metadata == {"method": method}
    else:
        assert policy.allows("search", method)


def test_a_call_of_several_methods_needs_all_of_them() -> None:
    access = make(Policy(default=Rules(methods=frozenset({"Encode"}))))
    assert access.identify(PEER, ("Encode",), "Bearer one")
    with pytest.raises(PermissionDeniedError, match="search may not call Explain: ask the operator"):
        access.identify(PEER, ("Encode", "Explain"), "Bearer one")


def test_a_client_without_the_model_may_only_describe_the_server() -> None:
    access = make(Policy(default=Rules(models=frozenset({"other"}))))
    for method in ("GetModel", "Metrics", "Check"):
        assert identify(access, "one", method)
    with pytest.raises(PermissionDeniedError, match="search may not use the model 'minilm'"):
        identify(access, "one", "Embed")


def test_share_priority_and_rates_come_from_the_policy() -> None:
    rules = Rules(share=4, priority="bulk", texts_per_second=1, burst_texts=2)
    access = make(Policy(clients={"search": rules}))
    client = identify(access, "one")
    assert (client.share, client.is_bulk) == (4, True)
    assert identify(access, "two").rates is None
    assert not identify(access, "two").is_bulk
    assert identify(access, "two", is_bulk=True).is_bulk
    assert client.rates is not None
    client.rates.take_texts(2)
    again = identify(access, "one", is_bulk=True)
    assert again.rates is not None
    with pytest.raises(RateLimitedError):
        again.rates.take_texts(1)


def test_each_anonymous_address_has_its_own_rates_and_their_number_is_limited() -> None:
    access = make(Policy(default=Rules(texts_per_second=1)), keys=False)
    first = access.identify("ipv4:10.0.0.1:1", ("Embed",))
    assert first.rates is not None
    assert access.identify("ipv4:10.0.0.1:2", ("Embed",)).rates is first.rates
    for number in range(MAX_RECENT + 10):
        access.identify(f"ipv6:%5B{number:x}::1%5D:1", ("Embed",))
    assert len(access._anonymous) == MAX_RECENT


async def test_files_are_watched_after_a_defect_of_their_parser(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, used = tmp_path / "policy", list[Policy]()
    path.write_text("")
    files = WatchedFiles([path], lambda: read_policy(path), used.append)
    path.write_text("x = " + "[" * 5000)  # exceeds the recursion limit
    await files.update()
    assert "a changed file is not used" in caplog.text
    path.write_text("open_health = false")
    await files.update()
    assert [policy.open_health for policy in used] == [True, False]


def test_new_keys_and_policies_apply_to_the_next_call_and_keep_used_rates() -> None:
    access = make(Policy(default=Rules(texts_per_second=1, burst_texts=5)))
    client = identify(access, "one")
    assert client.rates is not None
    client.rates.take_texts(5)
    access.use_policy(Policy(default=Rules(texts_per_second=2, burst_texts=5, methods=frozenset({"Embed"}))))
    same = identify(access, "one")
    assert same.rates is client.rates
    with pytest.raises(RateLimitedError, match="2 texts per second"):
        client.rates.take_texts(1)
    with pytest.raises(PermissionDeniedError):
        identify(access, "one", "Score")
    access.use_keys(KeyRing({hashlib.sha256(b"new").digest(): "search"}))
    assert identify(access, "new").name == "search"
    with pytest.raises(UnauthenticatedError):
        identify(access, "one")


def test_tables_for_clients_without_a_key_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy(clients={"search": Rules(), "serach": Rules()})
    make(policy)
    assert "for clients without a key: serach. Check" in caplog.text
    caplog.clear()
    make(policy, certificates=True)
    make(policy, keys=False)
    make(Policy(clients={"search": Rules()}))
    assert not caplog.text


def test_a_policy_that_needs_identities_requires_a_means_to_identify() -> None:
    with pytest.raises(
        StartupError, match=r"allow_anonymous = false, but .* set --api-keys or --tls-client-ca"
    ):
        make(Policy(allow_anonymous=False), keys=False)


@pytest.mark.parametrize(
    ("hosts", "is_exposed"),
    [
        ({"--host": "0.0.0.0"}, True),
        ({"--host": "::"}, True),
        ({"--host": "[::1]", "--http-host": "192.168.1.5"}, True),
        ({"--host": "encoder.internal"}, True),
        ({"--host": "127.0.0.1", "--http-host": "localhost"}, False),
        ({"--host": "::1"}, False),
        ({}, False),
    ],
)
def test_listening_for_others_without_access_control_logs_a_warning(
    caplog: pytest.LogCaptureFixture, hosts: dict[str, str], is_exposed: bool
) -> None:
    warn_if_exposed(make(keys=False), hosts)
    assert ("NO ACCESS CONTROL" in caplog.text) == is_exposed
    caplog.clear()
    warn_if_exposed(make(), hosts)
    warn_if_exposed(make(keys=False, certificates=True), hosts)
    warn_if_exposed(make(Policy(allow_anonymous=True), keys=False), hosts)
    assert not caplog.text


def test_metrics_port_has_no_access_control_even_if_others_have(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_exposed(make(keys=False), {"--host": "127.0.0.1", "--metrics-host": "0.0.0.0"})
    assert "NO ACCESS CONTROL" in caplog.text
    assert "(--metrics-host 0.0.0.0)" in caplog.text
    caplog.clear()
    warn_if_exposed(make(), {"--host": "0.0.0.0", "--metrics-host": "127.0.0.1"})
    warn_if_exposed(make(Policy(allow_anonymous=True), keys=False), {"--metrics-host": "0.0.0.0"})
    assert not caplog.text
    warn_if_exposed(make(), {"--host": "0.0.0.0", "--metrics-host": "::"})
    assert "the metrics port has no access control" in caplog.text
    assert "--metrics-host ::" in caplog.text


def test_refused_identities_are_logged_without_keys_and_cannot_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = Time()
    log = RefusalLog(time)
    errors: list[RequestError] = [UnauthenticatedError("the key is invalid"), PermissionDeniedError("no")]
    for _ in range(100):
        for error in errors:
            log.write(error, PEER, "", "Embed")
    shown: list[dict[str, Any]] = [vars(record) for record in caplog.records]
    assert [fields["reason"] for fields in shown] == [error.reason for error in errors]
    assert (shown[0]["name"], shown[0]["peer"], shown[0]["method"]) == (
        "attnlens_server.audit",
        "10.0.0.1",
        "Embed",
    )
    time.now = 61
    log.write(errors[0], PEER, "", "Embed")
    assert vars(caplog.records[-1])["omitted"] == 99
    caplog.clear()
    for number in range(5000):
        log.write(errors[0], f"ipv6:%5B{number:x}::1%5D:1", "", "Embed")
    assert len(caplog.records) <= 50
    assert len(log._senders) <= 1024


def test_missing_key_does_not_hide_invalid_keys_of_the_same_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    control = make()
    for header in ("", "Bearer wrong", "Bearer guessed", ""):
        with pytest.raises(UnauthenticatedError):
            control.identify(PEER, ("Embed",), header)
    causes = [vars(record)["cause"].partition(":")[0] for record in caplog.records]
    assert causes == ["the key is missing", "the key is invalid"]


def test_changed_names_are_logged_without_digests(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    caplog.set_level(logging.INFO, "attnlens_server.audit")
    log_changes(tmp_path, None, {"a": b"1", "b": b"2"})
    log_changes(tmp_path, {"a": b"1", "b": b"2"}, {"b": b"3", "c": b"4"})
    loaded, changed = (vars(record) for record in caplog.records)
    assert (loaded["msg"], loaded["names"]) == ("loaded", 2)
    assert [changed[name] for name in ("added", "removed", "changed")] == [["c"], ["a"], ["b"]]
