"""Requests to every method and route are answered as recorded: see `recorded_requests`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from recorded_requests.hosts import ABSENT, LocalTarget, MountedTarget
from recorded_requests.play import Record, Target
from recorded_requests.record import MODELS, played, plays, read, restricted, restricted_plays
from stored_bundle import STORED_BUNDLE

MAX_SHOWN = 20
NOT_OF_MOUNTED = {"GET /v1/models {Host: example.org}", "GET /openapi.json"}
"""The own application of an ASGI server checks host names, and its document describes other credentials."""


@pytest.fixture
def bundle_of(minilm_bundle: Path, classifier_bundle: Callable[[str], Path]) -> Callable[[str], Path]:
    bundles = {"embedder": minilm_bundle, "plain": STORED_BUNDLE}
    return lambda name: bundles.get(name) or classifier_bundle(name)


def assert_equal(found: dict[str, Record], recorded: dict[str, Record]) -> None:
    """Compare records, and show what differs by request."""
    differences = [
        f"{request}\n  recorded: {recorded.get(request)}\n  now:      {found.get(request)}"
        for request in dict.fromkeys([*recorded, *found])
        if recorded.get(request) != found.get(request)
    ]
    more = [f"and {len(differences) - MAX_SHOWN} more"] if len(differences) > MAX_SHOWN else []
    assert not differences, "\n".join(
        [f"{len(differences)} requests differ:", *differences[:MAX_SHOWN], *more]
    )


@pytest.mark.parametrize("name", MODELS)
def test_server_answers_as_recorded(name: str, bundle_of: Callable[[str], Path]) -> None:
    with Target(bundle_of(name)) as target:
        found = played(plays(MODELS[name]), target)
    assert_equal(found, read(name))


def test_server_refuses_what_a_policy_denies_as_recorded(tmp_path: Path) -> None:
    with restricted(tmp_path) as target:
        found = played(restricted_plays(), target)
    assert_equal(found, read("restricted"))


@pytest.mark.parametrize("host", [LocalTarget, MountedTarget])
def test_other_hosts_answer_as_servers(
    host: type[LocalTarget | MountedTarget], bundle_of: Callable[[str], Path]
) -> None:
    """Their replies and errors are those of a server, which also has a log and metrics."""
    for name, model in MODELS.items():
        recorded = read(name)
        with host(bundle_of(name)) as target:
            found = played(plays(model), target)
        served = {request: record for request, record in found.items() if record != ABSENT}
        served = {request: served[request] for request in served.keys() & recorded.keys() - NOT_OF_MOUNTED}
        assert len(served) > len(recorded) / 5
        assert_equal(served, {request: visible(recorded[request]) for request in served})


def visible(record: Record) -> Record:
    """Return the part of a server's record that its clients see."""
    return {name: value for name, value in record.items() if name not in ("log", "metrics")}
