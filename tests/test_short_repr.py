"""The `repr` of public results and options is bounded."""

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import attnlens_bulk
import attnlens_client
import attnlens_export
import attnlens_server
from attnlens.bundle import read_manifest
from attnlens.short_repr import MAX_REPR_CHARS
from attnlens_client import AttentionQuery, AttentionReduction, Client, TopK
from attnlens_export import BundleSummary, CheckSummary
from attnlens_export.contents import Verdict
from served import ServerProcess

PACKAGES = (attnlens_bulk, attnlens_client, attnlens_export, attnlens_server)
LONG = "x" * 100_000
CLASSES = {
    f"{package.__name__}.{name}": cls
    for package in PACKAGES
    for name in package.__all__
    if inspect.isclass(cls := getattr(package, name)) and dataclasses.is_dataclass(cls)
}


def uses_generated_repr(cls: type) -> bool:
    """Return whether a dataclass has no `__repr__` of its own."""
    return str(inspect.unwrap(cls.__repr__).__code__.co_filename) == "<string>"


def overfull(cls: type) -> Any:
    """Return an instance whose fields other than numbers have long values, without validation."""
    hints = get_type_hints(cls)
    instance: Any = object.__new__(cls)
    for field in dataclasses.fields(cls):
        is_number = hints[field.name] in (int, float, bool, int | None, float | None, bool | None)
        object.__setattr__(instance, field.name, 10**9 if is_number else LONG)
    return instance


GENERATED = {name: cls for name, cls in CLASSES.items() if uses_generated_repr(cls)}


@pytest.mark.parametrize("name", GENERATED)
def test_repr_of_a_public_dataclass_is_bounded(name: str) -> None:
    assert 0 < len(repr(overfull(GENERATED[name]))) <= MAX_REPR_CHARS


def results(client: Client) -> Iterator[Any]:
    """Yield results of all kinds of one long text."""
    text = "a" * 90 + " word" * 200
    queries = [AttentionQuery(), *[AttentionQuery(reduction=AttentionReduction(form=TopK(1)))] * 3]
    yield client
    yield client.get_model()
    yield client.get_model().parity
    yield client.embed_with_usage([text] * 3, truncate=True)
    [encoded] = client.encode([text], attention=queries, truncate=True)
    yield encoded
    yield from encoded.attention
    yield encoded.attention[1].reduced
    yield from client.encode_stream_parts([text], attention=queries[0], truncate=True)
    yield from client.tokenize([LONG, text])
    yield from client.explain([text, "a" * 5_000], truncate=True)
    comparison = client.compare(text, "b" * 5_000, matrix="output", truncate=True)
    yield comparison
    yield from comparison.a.scores


def test_repr_of_a_result_is_bounded(minilm_server: ServerProcess) -> None:
    with Client(minilm_server.address) as client:
        shown = {type(result).__name__: repr(result) for result in results(client)}
    own = {name.rpartition(".")[2] for name in CLASSES.keys() - GENERATED.keys()}
    assert own - shown.keys() == {
        "AsyncClient", "BundleSummary", "CheckSummary", "Classification", "RowStatistics", "Scores",
        "SparseWeights",
    }  # fmt: skip
    assert {name: len(text) for name, text in shown.items() if len(text) > MAX_REPR_CHARS} == {}


class _Failed:
    passed = False

    def failures(self) -> list[str]:
        return [LONG] * 10


def test_repr_of_a_summary_names_the_bundle_and_the_verdict(minilm_bundle: Path) -> None:
    verdict = Verdict(_Failed())  # type: ignore[arg-type]
    manifest = read_manifest(minilm_bundle)
    summaries = (
        BundleSummary(Path("bundle"), manifest, verdict, (LONG,) * 50, (LONG,)),
        CheckSummary(manifest, verdict, (LONG,)),
    )
    for summary, name in zip(summaries, ("'bundle'", repr(manifest.model_name)), strict=True):
        text = repr(summary)
        assert text.startswith(f"{type(summary).__name__}({name}, Verdict(1 results, failed: xxx")
        assert len(text) <= MAX_REPR_CHARS
        assert text.endswith("...)")
